//! The limits and environment variables of the process.

use kvx_core::{ErrorKind, Memory, Secret};
use kvx_testkit::{is_own_process, run_in_own_process, test};

#[test(own_process)]
fn a_pool_that_cannot_be_locked_names_the_limit_and_the_cure() {
    let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
    rustix::process::setrlimit(rustix::process::Resource::Memlock, none).unwrap();
    // SAFETY: a plain system call. Root is exempt from the limit, so this process gives up root.
    unsafe { libc::setresuid(65_534, 65_534, 65_534) };
    let error = Memory::pool(1 << 20).lock(true).build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exhausted);
    for word in ["RLIMIT_MEMLOCK is 0 bytes", "ulimit -l", "LimitMEMLOCK="] {
        assert!(error.to_string().contains(word), "{word} is missing in: {error}");
    }
    Memory::pool(1 << 20).build().unwrap(); // it can still be built without the lock
}

#[test]
fn the_secret_comes_from_the_environment_or_is_an_error() {
    const TITLE: &str = "surroundings::the_secret_comes_from_the_environment_or_is_an_error";
    /// The variable that tells a child process what result to expect.
    const EXPECTED: &str = "KVX_TEST_EXPECTED";
    if is_own_process() {
        let found = match Secret::from_environment() {
            Ok(secret) => format!("got {:?}", secret.map(|secret| *secret.bytes())),
            Err(error) => format!("failed {error}"),
        };
        let expected = std::env::var(EXPECTED).unwrap();
        assert!(found.contains(&expected), "{found}, not {expected}");
        return;
    }
    let file = std::env::temp_dir().join(format!("kvx-secret-{}", std::process::id()));
    std::fs::remove_file(&file).ok();
    let made = format!("got Some({:?})", *Secret::create(&file).unwrap().bytes());
    let path = file.to_str().unwrap();
    let missing = format!("{path}-missing");
    let cases: [(&[(&str, &str)], &str); 6] = [
        (&[], "got None"),
        (&[("KVX_SECRET_FILE", path)], &made),
        (&[("KVX_SECRET_FILE", &missing)], "failed the shared secret's file"),
        (&[("KVX_SECRET_FILE", "")], "failed the shared secret's file"),
        (&[("KVX_SECRET", "a passphrase of more than sixteen bytes")], "failed KVX_SECRET is set"),
        (&[("KVX_SECRET_FILE", path), ("KVX_SECRET", "")], "make one by `kvx secret FILE`"),
    ];
    for (variables, expected) in cases {
        run_in_own_process(TITLE, |command| {
            command.env_remove("KVX_SECRET").env_remove("KVX_SECRET_FILE");
            command.envs(variables.iter().copied()).env(EXPECTED, expected);
        })
        .unwrap();
    }
    std::fs::remove_file(&file).unwrap();
}

#[test]
fn a_secret_of_another_user_is_refused_and_one_of_root_is_not() {
    const NAME: &str = "a_secret_of_another_user_is_refused_and_one_of_root_is_not";
    let folder = std::env::temp_dir();
    let file = |which: &str| folder.join(format!("kvx-secret-of-{which}-{}", std::process::id()));
    if !rustix::process::geteuid().is_root() {
        return kvx_testkit::skip(NAME, "only root can give files away", "run it as root");
    }
    let (own, other) = (file("root"), file("other"));
    for path in [&own, &other] {
        std::fs::remove_file(path).ok();
        Secret::create(path).unwrap();
    }
    std::os::unix::fs::chown(&other, Some(65_534), None).unwrap();
    let (of_root, of_other) = (Secret::from_file(&own), Secret::from_file(&other));
    std::fs::remove_file(own).unwrap();
    std::fs::remove_file(other).unwrap();
    of_root.unwrap();
    let error = of_other.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(
        error.to_string().contains("belongs to user 65534") && error.to_string().contains("chown"),
        "{error}"
    );
}
