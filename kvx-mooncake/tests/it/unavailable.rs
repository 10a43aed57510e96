//! Tests that an unusable engine is an error with the reason, and that kvx does not use another in
//! its place.

use kvx_core::{ErrorKind, Options, Registry};
use kvx_mooncake::Mooncake;
use kvx_testkit::test;

use crate::adapter;

const VARIABLE: &str = "KVX_MOONCAKE_LIB";

/// A process loads one library, so the wrong one has to be tried first.
#[test(own_process)]
fn a_missing_library_or_transport_is_an_error() {
    another_library_is_refused_by_the_symbol_that_it_lacks();
    a_missing_transport_is_an_error();
}

const TEST: &str = "a_missing_library_or_transport_is_an_error";

fn another_library_is_refused_by_the_symbol_that_it_lacks() {
    if std::env::var_os(VARIABLE).is_some() {
        return kvx_testkit::skip(TEST, "KVX_MOONCAKE_LIB names a library", "unset it");
    }
    let mut registry = Registry::new();
    registry.add(Mooncake::new().or_files(["libm.so.6".into()])).unwrap();
    match registry.require("mooncake", &Options::new()) {
        Ok(_) => kvx_testkit::skip(TEST, "a libtransfer_engine.so is installed", "remove it"),
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Unavailable);
            let sentence = error.to_string();
            assert!(
                sentence.contains("libm.so.6 has no symbol createTransferEngine"),
                "{sentence}"
            );
            assert!(sentence.contains("kvx mooncake-adapter"), "it names a remedy: {sentence}");
        }
    }
}

fn a_missing_transport_is_an_error() {
    if adapter::or_skip(TEST).is_none() {
        return;
    }
    if std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut devices| devices.next().is_some())
    {
        return kvx_testkit::skip(TEST, "this machine has RDMA devices", "run it on one without");
    }
    let options = Options::parse(r#"{"mooncake_protocol": "rdma"}"#).unwrap();
    let error = adapter::registry("").require("MOONCAKE", &options).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("no RDMA device"), "{error}");
    let agent = kvx_core::Agent::builder("asks-for-rdma").backends(["MOONCAKE"]).options(options);
    assert_eq!(
        agent.registry(adapter::registry("")).build().err().unwrap().kind(),
        ErrorKind::Unavailable
    );
    let tcp = Options::parse(r#"{"mooncake_protocol": "tcp"}"#).unwrap();
    let caution = adapter::registry("").require("MOONCAKE", &tcp).unwrap().1.cautions.concat();
    assert!(
        caution.contains("all interfaces") && caution.contains("without authentication"),
        "{caution}"
    );
}
