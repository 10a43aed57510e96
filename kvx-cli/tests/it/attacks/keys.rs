//! L3: another user reads the keys of the proxy's clients.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use kvx_testkit::test;

use crate::attacks::kvx;

#[test]
fn key_files_that_other_users_can_read_are_rejected() {
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("keys-{}", std::process::id()));
    std::fs::write(&file, "a-key\n").unwrap();
    for mode in [0o644, 0o660, 0o604] {
        std::fs::set_permissions(&file, Permissions::from_mode(mode)).unwrap();
        let arguments = [
            "proxy",
            "--port",
            "0",
            "--decode",
            "http://127.0.0.1:1",
            "--api-key-file",
            file.to_str().unwrap(),
        ];
        let (succeeded, said) = kvx(&arguments);
        assert!(!succeeded && said.contains("chmod 600"), "{mode:o}: {said}");
    }
    std::fs::remove_file(file).unwrap();
}
