//! Tests the facade's registry: the backends that are compiled in, and those that are only known.

use kvx::{BackendStatus, Options};
use kvx_core::backend::Unavailable;
use kvx_testkit::test;

#[test(own_process)]
fn the_status_of_every_known_backend_matches_its_feature() {
    let registry = kvx::registry();
    for known in registry.known_names() {
        let (name, standing) = registry.status(known.name, &Options::new()).unwrap();
        assert_eq!(name, known.name);
        let compiled = match known.feature {
            Some("shm") => cfg!(feature = "shm"),
            Some("tcp") => cfg!(feature = "tcp"),
            Some("ucx") => cfg!(feature = "ucx"),
            Some("libfabric") => cfg!(feature = "libfabric"),
            Some("mooncake") => cfg!(feature = "mooncake"),
            Some("rixl") => cfg!(feature = "rixl"),
            Some(other) => panic!("feature {other:?} of {name} is not in this test"),
            None => false,
        };
        match standing {
            BackendStatus::Available(_) | BackendStatus::Unavailable(Unavailable { .. }) => {
                assert!(compiled, "{name}")
            }
            BackendStatus::NotCompiled { feature } => {
                assert!(!compiled && Some(feature) == known.feature, "{name}")
            }
            BackendStatus::NotReleased => assert!(known.feature.is_none(), "{name}"),
        }
    }
}

#[test]
fn the_order_of_preference_is_shm_then_ucx_then_libfabric_then_tcp() {
    let names: Vec<_> = kvx::registry().factories().iter().map(|factory| factory.name()).collect();
    let compiled = [
        ("SHM", cfg!(feature = "shm")),
        ("UCX", cfg!(feature = "ucx")),
        ("LIBFABRIC", cfg!(feature = "libfabric")),
        ("TCP", cfg!(feature = "tcp")),
        ("MOONCAKE", cfg!(feature = "mooncake")),
        ("RIXL", cfg!(feature = "rixl")),
    ];
    let expected: Vec<_> =
        compiled.into_iter().filter_map(|(name, is)| is.then_some(name)).collect();
    assert_eq!(names, expected);
}

#[test]
#[cfg(feature = "ucx")]
fn the_configuration_and_ucx_agree_on_the_number_of_threads() {
    assert_eq!(kvx::config::NUM_THREADS, kvx::Ucx::NUM_THREADS);
}
