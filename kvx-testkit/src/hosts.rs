//! Hosts with addresses of their own: namespaces of the network on this machine.

use std::ffi::OsStr;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::check::{CUT_OFF, Check, Failure};
use crate::process::output_if_started;
use crate::skip::{note_ignored, skip};

/// A program and its words, behind which another one has namespaces of its own.
pub(crate) const UNSHARE: [&str; 3] = ["unshare", "--net", "--mount"];
/// The cure where that is refused.
pub(crate) const CURE: &str = "run the tests as root, with util-linux and iproute2";

/// In the process that runs a test on a host of its own: the ways to the far end's host and to the
/// switch.
const WAYS: [&str; 2] = ["KVX_TESTKIT_WAY", "KVX_TESTKIT_SWITCH"];

/// One of [`Hosts`]. Programs that run there outlive it.
pub struct Host {
    /// Keeps the namespaces, until this process closes its input or ends.
    keeper: std::process::Child,
}

/// Hosts on one switch, which is there as long as this is.
pub struct Hosts {
    /// In the order of their numbers, which count from 1.
    pub each: Vec<Host>,
    switch: Host,
}

impl Host {
    /// With loopback alone.
    fn new() -> Result<Self, Failure> {
        // Libraries look for cards in `/sys`.
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
                return Err(Failure::new("a network namespace does not come up"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let said = host.keeper.stderr.take().map(std::io::read_to_string).transpose()?;
        Err(Failure::new(format!("no network namespace: {}", said.unwrap_or_default().trim())))
    }

    fn is_up(&self) -> bool {
        let network = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/net")).ok();
        // The keeper begins in our network, where `lo` is up as well: what entered too early would
        // work on ours.
        network(&self.keeper.id().to_string()) != network("self")
            && output_if_started(self.command("ip").args(["addr", "show", "lo"]), CUT_OFF)
                .is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("LOOPBACK,UP"))
    }

    /// The words behind which a program runs there, in the folder of this one.
    pub(crate) fn way(&self) -> [String; 6] {
        ["nsenter", "-t", &self.keeper.id().to_string(), "-n", "-m", "-w"].map(str::to_owned)
    }

    /// A program there, under the number of this command's process.
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

/// Runs a program in the namespaces that this way leads to.
fn run_there(way: &[String], program: &str, arguments: &str) -> Check {
    let (enter, words) =
        way.split_first().ok_or_else(|| Failure::new("this test is on no host of its own"))?;
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

/// Returns why nothing can be started behind these words, if it cannot.
pub fn refused_behind(words: &[&str], test: &[&str]) -> Option<String> {
    let (program, more) = words.split_first()?;
    let why = match output_if_started(Command::new(program).args(more).args(test), CUT_OFF) {
        Err(error) => error.to_string(),
        Ok(tested) if tested.status.success() => return None,
        Ok(tested) => match String::from_utf8_lossy(&tested.stderr).trim() {
            "" => format!("{} fails without a word [cannot run here]", test.join(" ")),
            said => said.to_owned(),
        },
    };
    Some(format!("{}: {why}", words.join(" ")))
}

/// Begins the error of [`run_one_test`] for a process that died after its test had passed, as some
/// libraries make theirs do.
pub const DIED_AFTER_PASSING: &str = "the test passed, then its process died";

/// Runs a command that is the test of this title in another process of this program. Returns what
/// it printed. If it was skipped there, this one is skipped with it.
///
/// # Errors
/// What it printed, if it failed or ran nothing; [`DIED_AFTER_PASSING`] leads if the test itself
/// passed.
pub fn run_one_test(title: &str, test: &mut Command, limit: Duration) -> Result<String, Failure> {
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

/// Returns the output of a test program without the lines of its harness: a runner that reads them
/// as part of this process's output would count a failed test twice.
fn without_verdicts(printed: &str) -> String {
    let of_harness = ["running ", "test ", "failures:", "---- "];
    let lines =
        printed.lines().filter(|line| !of_harness.iter().any(|begin| line.starts_with(begin)));
    lines.filter(|line| !line.trim().is_empty()).collect::<Vec<_>>().join("\n")
}

/// Returns a reason without the marks that a harness puts around it: `, reason` or ` (reason)`.
fn bare(reason: &str) -> &str {
    let in_brackets = reason.strip_prefix(" (").and_then(|rest| rest.strip_suffix(')'));
    in_brackets.unwrap_or(reason.trim_start_matches(", "))
}

impl Drop for Host {
    fn drop(&mut self) {
        self.keeper.kill().ok(); // an error: it has ended
        self.keeper.wait().ok();
    }
}

impl Hosts {
    /// So many, for the test of this title; none, and it is skipped in words, where there are none:
    /// they need root.
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

    /// Makes so many hosts, each with an interface `eth0`.
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

    /// Runs one test of this program in a process on one of two hosts, whose far ends are on the
    /// other. Gives what it said.
    ///
    /// # Errors
    /// The step that failed, and the test's output if it failed.
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

    /// In such a process: the words behind which a far end is started.
    pub fn way_to_far() -> Option<Vec<String>> {
        Self::way_named(WAYS[0])
    }

    fn way_named(name: &str) -> Option<Vec<String>> {
        Some(std::env::var(name).ok()?.split_whitespace().map(str::to_owned).collect())
    }

    /// In such a process: has the switch let nothing through to the far end's host and from it, or
    /// let it through again. Neither end is told.
    pub fn cut_off_far(cut: bool) -> Check {
        let switch = Self::way_named(WAYS[1]).unwrap_or_default();
        run_there(
            &switch,
            "ip",
            if cut { "link set port2 nomaster" } else { "link set port2 master bridge" },
        )
    }

    /// The address of the host of this number.
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
