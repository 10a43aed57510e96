//! Hosts with their own addresses: network namespaces on this machine.

use std::ffi::OsStr;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::check::{CUT_OFF, Check, Failure};
use crate::process::output_if_started;
use crate::skip::{note_ignored, skip};
use crate::tier::Tier;

/// A program and its arguments that run another program in new namespaces.
pub(crate) const UNSHARE: [&str; 3] = ["unshare", "--net", "--mount"];
/// The cure if that is not permitted.
pub(crate) const CURE: &str = "run the tests as root, with util-linux and iproute2";

/// Environment variables of a process that runs a test on a separate host: how to enter the far
/// end's host, and how to enter the switch.
const WAYS: [&str; 2] = ["KVX_TESTKIT_WAY", "KVX_TESTKIT_SWITCH"];

/// One of [`Hosts`]. Programs that run there outlive it.
pub struct Host {
    /// A process that keeps the namespaces alive until this process closes its input or ends.
    keeper: std::process::Child,
}

/// Hosts on one switch, which exists as long as this value.
pub struct Hosts {
    /// The hosts, in the order of their numbers, which count from 1.
    pub each: Vec<Host>,
    switch: Host,
}

impl Host {
    /// Creates a host that has only a loopback interface.
    fn new() -> Result<Self, Failure> {
        // Libraries look for network cards in `/sys`.
        const KEEPER: &str = "mount -t sysfs sysfs /sys && ip link set lo up && exec cat";
        let mut command = Command::new(UNSHARE[0]);
        command
            .args(&UNSHARE[1..])
            .args(["sh", "-c", KEEPER])
            .stdin(Stdio::piped())
            .stdout(Stdio::null());
        let mut host = Host { keeper: command.stderr(Stdio::piped()).spawn()? };
        let until = Instant::now() + CUT_OFF;
        while host.keeper.try_wait()?.is_none() {
            if host.is_up() {
                return Ok(host);
            }
            if Instant::now() > until {
                return Err(Failure::new("a network namespace did not come up in time"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let said = host.keeper.stderr.take().map(std::io::read_to_string).transpose()?;
        Err(Failure::new(format!("no network namespace: {}", said.unwrap_or_default().trim())))
    }

    fn is_up(&self) -> bool {
        let network = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/net")).ok();
        // The keeper starts in this process's network, where `lo` is up as well. A program that
        // entered too early would run in this network.
        network(&self.keeper.id().to_string()) != network("self")
            && output_if_started(self.command("ip").args(["addr", "show", "lo"]), CUT_OFF)
                .is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("LOOPBACK,UP"))
    }

    /// Returns the program and arguments that run another program on the host, in the current
    /// folder.
    pub(crate) fn way(&self) -> [String; 6] {
        ["nsenter", "-t", &self.keeper.id().to_string(), "-n", "-m", "-w"].map(str::to_owned)
    }

    /// Returns a command that runs a program on the host. The program keeps the process id of the
    /// command.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let way = self.way();
        let mut command = Command::new(&way[0]);
        command.args(&way[1..]).arg(program);
        command
    }

    fn ip(&self, arguments: &str) -> Check {
        run_there(&self.way(), "ip", arguments)
    }
}

/// Runs a program in the namespaces that `way` enters.
fn run_there(way: &[String], program: &str, arguments: &str) -> Check {
    let (enter, words) = way
        .split_first()
        .ok_or_else(|| Failure::new("this test does not run on a separate host"))?;
    let done = output_if_started(
        Command::new(enter).args(words).arg(program).args(arguments.split(' ')),
        CUT_OFF,
    )?;
    if done.status.success() {
        return Ok(());
    }
    Err(Failure::new(format!(
        "{program} {arguments}: {}",
        String::from_utf8_lossy(&done.stderr).trim()
    )))
}

/// Returns why no program can be started behind these words, or `None` if it can.
pub fn refused_behind(words: &[&str], test: &[&str]) -> Option<String> {
    let (program, more) = words.split_first()?;
    let why = match output_if_started(Command::new(program).args(more).args(test), CUT_OFF) {
        Err(error) => error.to_string(),
        Ok(tested) if tested.status.success() => return None,
        Ok(tested) => match String::from_utf8_lossy(&tested.stderr).trim() {
            "" => format!("{} fails without a message [cannot run here]", test.join(" ")),
            said => said.to_owned(),
        },
    };
    Some(format!("{}: {why}", words.join(" ")))
}

/// The start of the error of [`run_one_test`] for a process that died after its test had passed, as
/// some libraries cause.
pub const DIED_AFTER_PASSING: &str = "the test passed, then its process died";

/// Runs a command that is the test of this title in another process of this program. Returns its
/// output. If the test was skipped there, it counts as skipped here too.
///
/// # Errors
/// The output, if the test failed or nothing ran; it starts with [`DIED_AFTER_PASSING`] if the test
/// itself passed.
pub fn run_one_test(title: &str, test: &mut Command, limit: Duration) -> Result<String, Failure> {
    Tier::pass_to(test);
    let done = output_if_started(test, limit)?;
    let printed = String::from_utf8_lossy(&done.stdout).into_owned();
    let ignored =
        printed.lines().find_map(|line| line.strip_prefix("test ")?.split_once(" ... ignored"));
    match (done.status.success(), ignored) {
        // The other process has reported the skip to the runner.
        (true, Some((_, reason))) => note_ignored(title, bare(reason)),
        (true, None) if printed.contains("1 passed") => {}
        _ => {
            let errors = String::from_utf8_lossy(&done.stderr);
            let lead = if printed.contains("1 passed") {
                format!("{DIED_AFTER_PASSING}: ")
            } else {
                String::new()
            };
            return Err(Failure::new(format!(
                "{lead}{}\n{errors}\n{}",
                done.status,
                without_verdicts(&printed)
            )));
        }
    }
    eprint!("{}", String::from_utf8_lossy(&done.stderr));
    Ok(printed)
}

/// Returns the output of a test program without the lines of its harness. A runner that parses them
/// as part of this process's output would count a failed test twice.
fn without_verdicts(printed: &str) -> String {
    let of_harness = ["running ", "test ", "failures:", "---- "];
    let lines =
        printed.lines().filter(|line| !of_harness.iter().any(|begin| line.starts_with(begin)));
    lines.filter(|line| !line.trim().is_empty()).collect::<Vec<_>>().join("\n")
}

/// Returns a reason without the punctuation that a harness puts around it: `, reason` or `
/// (reason)`.
fn bare(reason: &str) -> &str {
    let in_brackets = reason.strip_prefix(" (").and_then(|rest| rest.strip_suffix(')'));
    in_brackets.unwrap_or(reason.trim_start_matches(", "))
}

impl Drop for Host {
    fn drop(&mut self) {
        self.keeper.kill().ok(); // the error means that it has ended
        self.keeper.wait().ok();
    }
}

impl Hosts {
    /// Creates `count` hosts for the test of this title. Returns `None`, and skips the test with
    /// the reason, if hosts cannot be created; they require root.
    ///
    /// # Errors
    /// The step that failed.
    pub fn for_test(title: &str, count: usize) -> Result<Option<Self>, Failure> {
        if let Some(why) = refused_behind(&UNSHARE, &["true"]) {
            skip(title, &why, CURE);
            return Ok(None);
        }
        Hosts::new(count).map(Some)
    }

    /// Creates `count` hosts, each with an interface `eth0`.
    pub(crate) fn new(count: usize) -> Result<Self, Failure> {
        let mut hosts = Hosts { each: Vec::new(), switch: Host::new()? };
        let switch = &hosts.switch;
        switch.ip("link add name bridge type bridge")?;
        switch.ip("link set bridge up")?;
        for at in 1..=count {
            let host = Host::new()?;
            switch.ip(&format!(
                "link add port{at} type veth peer name eth0 netns {}",
                host.keeper.id()
            ))?;
            switch.ip(&format!("link set port{at} master bridge up"))?;
            host.ip(&format!("addr add {}/24 dev eth0", Hosts::address(at)))?;
            host.ip("link set eth0 up")?;
            hosts.each.push(host);
        }
        Ok(hosts)
    }

    /// Runs one test of this program in a process on one of two hosts; its far ends run on the
    /// other. Returns the test's output.
    ///
    /// # Errors
    /// The step that failed, or the test's output if it failed.
    pub fn run_test(title: &str, limit: Duration) -> Result<String, Failure> {
        let hosts = Hosts::new(2)?;
        let [near, far] = &hosts.each[..] else { unreachable!("two hosts") };
        let mut test = near.command(std::env::current_exe()?);
        test.args(["--exact", title]);
        WAYS.iter()
            .zip([far, &hosts.switch])
            .for_each(|(name, host)| _ = test.env(name, host.way().join(" ")));
        run_one_test(title, &mut test, limit)
    }

    /// Returns, in such a process, the program and arguments that start a far end.
    pub fn way_to_far() -> Option<Vec<String>> {
        Self::way_named(WAYS[0])
    }

    fn way_named(name: &str) -> Option<Vec<String>> {
        Some(std::env::var(name).ok()?.split_whitespace().map(str::to_owned).collect())
    }

    /// In such a process, makes the switch drop all traffic to and from the far end's host, or
    /// forward it again. Neither end is notified.
    pub fn cut_off_far(cut: bool) -> Check {
        let switch = Self::way_named(WAYS[1]).unwrap_or_default();
        run_there(
            &switch,
            "ip",
            if cut { "link set port2 nomaster" } else { "link set port2 master bridge" },
        )
    }

    /// Makes the switch drop all traffic to and from the host with this number, or forward it again.
    ///
    /// # Errors
    /// The step that failed.
    pub fn cut_off(&self, number: usize, cut: bool) -> Check {
        self.switch.ip(&format!(
            "link set port{number} {}",
            if cut { "nomaster" } else { "master bridge" }
        ))
    }

    /// Returns the address of the host with this number.
    pub fn address(number: usize) -> String {
        format!("10.77.0.{number}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_elsewhere_has_no_verdicts() {
        let printed = "\nrunning 1 test\ntest a::b ... FAILED\n\nfailures:\n\n---- a::b ----\n1 is not 2\n\n\n\
                       failures:\n    a::b\n\ntest result: FAILED. 0 passed; 1 failed\n";
        assert_eq!(without_verdicts(printed), "1 is not 2\n    a::b");
    }

    #[test]
    fn a_process_that_dies_after_its_test_says_that_it_passed() {
        let run = |script: &str| {
            let mut child = Command::new("sh");
            let ran = run_one_test("a::b", child.args(["-c", script]), CUT_OFF);
            ran.map_err(|failure| failure.to_string())
        };
        let died = run("echo 'test result: ok. 1 passed; 0 failed'; kill -SEGV $$").unwrap_err();
        assert!(died.starts_with(DIED_AFTER_PASSING), "{died}");
        let failed = run("echo 'test result: FAILED. 0 passed; 1 failed'; exit 101").unwrap_err();
        assert!(!failed.contains(DIED_AFTER_PASSING), "{failed}");
        assert!(run("echo 'test result: ok. 1 passed; 0 failed'").is_ok());
    }

    #[test]
    fn reasons_of_either_harness_are_the_same() {
        assert_eq!(bare(" (no GPU (code 1); cure: another)"), "no GPU (code 1); cure: another");
        assert_eq!(bare(", no GPU (code 1)"), "no GPU (code 1)");
        assert_eq!(bare(""), "");
    }
}
