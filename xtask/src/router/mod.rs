//! `cargo xtask router`: builds the router as a static program, and runs it where nothing else is, as
//! in the image of deploy/docker/router.Dockerfile.

mod instance;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use crate::metadata::Metadata;
use crate::process::{self, Deadline};
use crate::release::ROUTER;
use crate::{Result, root, skips};

/// The limit of the whole command, most of which is the build.
const LIMIT: Duration = Duration::from_secs(30 * 60);
/// The limit of each step of the router: its start, a health check, an answer.
const STEP: Duration = Duration::from_secs(30);
/// The most bytes of the program, without symbols.
const MOST_BYTES: u64 = 20 << 20;
/// The user of the image, who may read the secret by its group.
const USER: u32 = 65532;
/// The secret's file in the router's folder.
const SECRET: &str = "/run/kvx/fleet.secret";
/// A name that only the file `/etc/hosts` of the router's folder knows.
const NAME: &str = "engine.test";

/// Builds the router, or takes `program`, and checks it. Prints what it checked.
pub(crate) fn command(program: Option<&Path>) -> Result<bool> {
    let deadline = Deadline::after(LIMIT);
    let target = Metadata::of_members()?.target_directory;
    let built = match program {
        Some(program) => program.to_owned(),
        None => ROUTER.build(root(), &target, deadline)?,
    };
    let folder = target.join("xtask/router");
    let _ = std::fs::remove_dir_all(&folder); // left by an earlier run
    std::fs::create_dir_all(&folder)?;
    let router = folder.join("kvx");
    let mut strip = Command::new("strip");
    strip.arg("-o").arg(&router).arg(&built);
    process::must_succeed(strip, deadline)?;
    let bytes = std::fs::read(&router)?;
    check_program(&bytes)?;
    println!("{}: static, {} bytes without symbols", router.display(), bytes.len());
    if !rustix::process::geteuid().is_root() {
        let why = "this user may not change the root folder (chroot)";
        skips::note("the router in an empty folder", why, "run cargo xtask router as root")?;
        return Ok(true);
    }
    let alone = folder.join("root");
    std::fs::create_dir_all(&alone)?;
    std::fs::copy(&router, alone.join("kvx"))?;
    let mut version = in_folder(&alone, USER);
    version.arg("--version");
    println!("in an empty folder: {}", process::output_of(version, STEP)?.trim());
    let instance = instance::start()?.port();
    serves(
        &alone,
        [format!("http://127.0.0.1:{instance}"), format!("http://127.0.0.1:{instance}")],
    )?;
    println!("in an empty folder: a request through it is answered");
    // As Kubernetes and Docker mount it, and the secret as Kubernetes does.
    std::fs::create_dir_all(alone.join("etc"))?;
    std::fs::write(alone.join("etc/hosts"), format!("127.0.0.1 {NAME}\n"))?;
    mount_secret(&alone, deadline)?;
    serves(&alone, [format!("dns+http://{NAME}:{instance}"), format!("http://{NAME}:{instance}")])?;
    println!("with /etc/hosts and a secret: it finds engines by name");
    Ok(true)
}

/// Checks that a program is small, and that it needs no loader and so no library.
fn check_program(bytes: &[u8]) -> Result<()> {
    if bytes.len() as u64 > MOST_BYTES {
        let why = format!("it has {} bytes, and may have {MOST_BYTES}", bytes.len());
        return Err(format!("the router is too large: {why}").into());
    }
    match has_loader(bytes) {
        Some(false) => Ok(()),
        Some(true) => Err("the router is not static: it names a loader (PT_INTERP)".into()),
        None => Err("the router is no ELF file of 64 bits".into()),
    }
}

/// Returns whether an ELF file of 64 bits, little endian, has a program header PT_INTERP.
fn has_loader(bytes: &[u8]) -> Option<bool> {
    const PT_INTERP: u64 = 3;
    let number = |at: usize, len: usize| -> Option<u64> {
        let field = bytes.get(at..at.checked_add(len)?)?;
        Some(field.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    };
    if bytes.get(..6)? != b"\x7fELF\x02\x01" {
        return None;
    }
    let (table, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
    let mut found = false;
    for index in 0..count {
        let header = usize::try_from(table.checked_add(index * size)?).ok()?;
        found |= number(header, 4)? == PT_INTERP;
    }
    Some(found)
}

/// Makes a secret that belongs to root, and that the group of the image's user may read.
fn mount_secret(folder: &Path, deadline: Deadline) -> Result<()> {
    use std::os::unix::fs::{PermissionsExt as _, chown};
    let file = folder.join(SECRET.trim_start_matches('/'));
    std::fs::create_dir_all(file.parent().ok_or("the secret has no folder")?)?;
    let mut make = in_folder(folder, 0);
    make.args(["secret", SECRET]);
    process::must_succeed(make, deadline)?;
    chown(&file, Some(0), Some(USER))?;
    Ok(std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o440))?)
}

/// Returns a command that runs `kvx` as this user where only `folder` exists.
fn in_folder(folder: &Path, user: u32) -> Command {
    let mut command = Command::new("chroot");
    command.arg(format!("--userspec={user}:{user}")).arg(folder).arg("/kvx").env_clear();
    if folder.join(SECRET.trim_start_matches('/')).exists() {
        command.env("KVX_SECRET_FILE", SECRET);
    }
    command.env("PATH", std::env::var_os("PATH").unwrap_or_default());
    command
}

/// A running router, which ends with this value.
struct Router {
    child: Child,
    address: SocketAddr,
}

impl Drop for Router {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it has ended already
        let _ = self.child.wait();
    }
}

impl Router {
    /// Starts a router in `folder`, on any free port.
    fn start(folder: &Path, [prefill, decode]: &[String; 2]) -> Result<Router> {
        let mut command = in_folder(folder, USER);
        command.args(["proxy", "--port", "0", "--access-log", "off"]);
        command.args(["--prefill", prefill, "--decode", decode]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).process_group(0);
        let mut child = command.spawn()?;
        let errors = child.stderr.take().ok_or("the router has no standard error")?;
        let mut router = Router { child, address: (Ipv4Addr::LOCALHOST, 0).into() };
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(errors).lines().map_while(std::io::Result::ok) {
                println!("    {line}");
                let _ = sender.send(line); // nobody waits for later lines
            }
        });
        let deadline = Instant::now() + STEP;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = lines.recv_timeout(left).map_err(|_| "the router does not listen")?;
            if let Some(address) = line.strip_prefix("kvx: listening on http://") {
                router.address = address.parse()?;
                return Ok(router);
            }
        }
    }

    /// Sends a request, and returns the whole answer.
    fn ask(&self, request: &str) -> Result<String> {
        let mut stream = TcpStream::connect_timeout(&self.address, STEP)?;
        stream.set_read_timeout(Some(STEP))?;
        stream.write_all(request.as_bytes())?;
        let mut answer = String::new();
        stream.take(1 << 20).read_to_string(&mut answer)?;
        Ok(answer)
    }

    fn get(&self, path: &str) -> Result<String> {
        self.ask(&format!("GET {path} HTTP/1.1\r\nhost: router\r\nconnection: close\r\n\r\n"))
    }
}

/// Runs a router in `folder` between a prefill and a decode, until a request through both of them is
/// answered.
fn serves(folder: &Path, instances: [String; 2]) -> Result<()> {
    let router = Router::start(folder, &instances)?;
    let health = router.get("/health")?;
    if !health.starts_with("HTTP/1.1 200") {
        return Err(format!("/health: {health}").into());
    }
    let deadline = Instant::now() + STEP;
    loop {
        let ready = router.get("/ready")?;
        if ready.starts_with("HTTP/1.1 200") {
            break;
        }
        if Instant::now() > deadline {
            return Err(format!("/ready within {STEP:?}: {ready}").into());
        }
        thread::sleep(Duration::from_millis(100)); // between polls
    }
    let body =
        format!("{{\"model\": \"{}\", \"prompt\": \"hello\", \"max_tokens\": 1}}", instance::MODEL);
    let answer = router.ask(&format!(
        "POST /v1/completions HTTP/1.1\r\nhost: router\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    ))?;
    let is_whole = answer.starts_with("HTTP/1.1 200")
        && answer.contains("x-kvx-route: disaggregated")
        && answer.contains(instance::TEXT);
    if is_whole { Ok(()) } else { Err(format!("a completion: {answer}").into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_with_a_loader_or_too_many_bytes_are_refused() {
        let this = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert_eq!(has_loader(&this), Some(true), "this test is not static");
        // PT_INTERP becomes PT_NULL.
        let number = |at: usize| u64::from_le_bytes(this[at..at + 8].try_into().unwrap()) as usize;
        let mut without = this.clone();
        let headers = (0..usize::from(this[56])).map(|index| number(32) + index * 56);
        let header = headers.into_iter().find(|at| this[*at..*at + 4] == [3, 0, 0, 0]).unwrap();
        without[header] = 0;
        assert_eq!(has_loader(&without), Some(false));
        for wrong in [&b"#!/bin/sh\n"[..], &this[..60], b""] {
            assert_eq!(has_loader(wrong), None);
        }
        without.resize(MOST_BYTES as usize + 1, 0);
        let error = check_program(&without).unwrap_err().to_string();
        assert!(error.contains("too large"), "{error}");
    }
}
