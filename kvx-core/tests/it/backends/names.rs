//! The messages for names of backends that are unknown, not compiled in, unavailable or not
//! released.

use std::path::PathBuf;
use std::sync::Arc;

use kvx_core::backend::{
    Admission, AutoOpen, Availability, BackendName, Context, Factory, Placement, Transport,
    Unavailable,
};
use kvx_core::{Agent, BackendStatus, Error, ErrorKind, Options, Registry, Result, Secret};
use kvx_testkit::test;

use super::still::availability;

const KNOWN: &[BackendName] = &[
    BackendName { name: "UCX", aliases: &[], feature: Some("ucx") },
    BackendName { name: "LIBFABRIC", aliases: &[], feature: Some("libfabric") },
    BackendName { name: "RIXL", aliases: &["NIXL"], feature: None },
    BackendName { name: "WIRE", aliases: &[], feature: Some("wire") },
];

/// A backend that is available if the test wants it, and cannot be opened.
struct Stub {
    name: &'static str,
    order: u32,
    missing: Option<Unavailable>,
}

impl Stub {
    fn working(name: &'static str, order: u32) -> Self {
        Stub { name, order, missing: None }
    }

    fn without_its_library() -> Self {
        let missing = Unavailable {
            missing: "libucp.so.0 not found".into(),
            variable: Some("KVX_UCX_LIB"),
            value: None,
            tried: vec!["libucp.so.0".into(), "libucp.so".into()],
            cure: "apt install libucx0, or set KVX_UCX_LIB to the file".into(),
        };
        Stub { name: "UCX", order: 10, missing: Some(missing) }
    }
}

impl Factory for Stub {
    fn name(&self) -> &'static str {
        self.name
    }

    fn placement(&self) -> Placement {
        Placement { order: self.order, auto_open: AutoOpen::Skip, speaks_for: &[] }
    }

    fn available(&self, _options: &Options) -> Result<Availability, Unavailable> {
        match &self.missing {
            Some(missing) => Err(missing.clone()),
            None => Ok(Availability {
                version: "7.1".into(),
                library: Some(PathBuf::from("/lib/libwire.so.7")),
                ..availability()
            }),
        }
    }

    fn open(&self, _context: Context) -> Result<Arc<dyn Transport>> {
        Err(Error::new(ErrorKind::Unsupported, "a stub moves nothing"))
    }
}

fn sentence(registry: &Registry, name: &str) -> (ErrorKind, String) {
    let error =
        registry.require(name, &Options::new()).err().expect("the test names what cannot be used");
    (error.kind(), error.to_string())
}

#[test]
fn an_unknown_name_gets_the_nearest_one_and_all_there_are() {
    let mut registry = Registry::new().with_names(KNOWN);
    registry.add(Stub::working("WIRE", 1)).unwrap();
    assert_eq!(
        sentence(&registry, "UXC"),
        (
            ErrorKind::UnknownBackend,
            "backend \"UXC\" is unknown; did you mean UCX? known: UCX, LIBFABRIC, RIXL, WIRE"
                .into()
        )
    );
    assert_eq!(
        sentence(&registry, "nixxl").1,
        "backend \"nixxl\" is unknown; did you mean NIXL? known: UCX, LIBFABRIC, RIXL, WIRE"
    );
    for far in ["", "infiniband"] {
        assert_eq!(
            sentence(&registry, far).1,
            format!("backend \"{far}\" is unknown; known: UCX, LIBFABRIC, RIXL, WIRE")
        );
    }
}

#[test]
fn a_backend_that_was_not_compiled_in_names_its_feature() {
    let registry = Registry::new().with_names(KNOWN);
    assert_eq!(
        sentence(&registry, "ucx"),
        (ErrorKind::NotCompiled, "backend UCX is not in this build: enable feature \"ucx\"".into())
    );
}

#[test]
fn an_unavailable_backend_names_library_variable_attempts_and_cure() {
    let mut registry = Registry::new().with_names(KNOWN);
    registry.add(Stub::without_its_library()).unwrap();
    assert_eq!(
        sentence(&registry, "Ucx"),
        (
            ErrorKind::Unavailable,
            "backend UCX is unavailable: libucp.so.0 not found (KVX_UCX_LIB unset; tried \
             libucp.so.0, libucp.so): apt install libucx0, or set KVX_UCX_LIB to the file"
                .into()
        )
    );
}

#[test]
fn the_reason_shows_the_variable_as_it_is_and_leaves_out_what_is_not_there() {
    let set = Unavailable {
        value: Some("/opt/ucx/libucp.so.0".into()),
        tried: Vec::new(),
        ..Stub::without_its_library().missing.unwrap()
    };
    assert_eq!(set.reason(), "libucp.so.0 not found (KVX_UCX_LIB=/opt/ucx/libucp.so.0)");
    let plain = Unavailable::because("no boot id", "mount /proc");
    assert_eq!(
        (plain.reason(), plain.to_string()),
        ("no boot id".into(), "no boot id: mount /proc".into())
    );
}

#[test]
fn a_known_backend_without_a_feature_is_not_in_this_release_under_every_name() {
    let registry = Registry::new().with_names(KNOWN);
    for name in ["RIXL", "nixl"] {
        let (kind, sentence) = sentence(&registry, name);
        assert_eq!(kind, ErrorKind::NotCompiled);
        assert!(sentence.starts_with("backend RIXL is not in this release"), "{sentence}");
    }
}

#[test]
fn any_letter_case_finds_a_working_backend() {
    let mut registry = Registry::new().with_names(KNOWN);
    registry.add(Stub::working("WIRE", 1)).unwrap();
    for name in ["WIRE", "wire", "Wire"] {
        let (factory, found) = registry.require(name, &Options::new()).unwrap();
        assert_eq!((factory.name(), &*found.version), ("WIRE", "7.1"));
    }
}

#[test]
fn a_backend_that_no_table_knows_is_added_at_run_time() {
    let mut registry = Registry::new().with_names(KNOWN);
    registry.add(Stub::working("WIRE", 2)).unwrap().add(Stub::working("HOMEMADE", 1)).unwrap();
    assert_eq!(registry.names(), ["UCX", "LIBFABRIC", "RIXL", "WIRE", "HOMEMADE"]);
    let order: Vec<_> = registry.factories().iter().map(|factory| factory.name()).collect();
    assert_eq!(order, ["HOMEMADE", "WIRE"], "in the order of their placement");
    let (_, standing) = registry.status("homemade", &Options::new()).unwrap();
    assert!(matches!(standing, BackendStatus::Available(_)));
    let taken = registry.add(Stub::working("WIRE", 3)).unwrap_err();
    assert_eq!(taken.kind(), ErrorKind::Invalid);
}

#[test]
fn an_agent_that_is_built_says_the_same_sentences() {
    let mut registry = Registry::new().with_names(KNOWN);
    registry.add(Stub::without_its_library()).unwrap().add(Stub::working("WIRE", 1)).unwrap();
    let refused = |names: &[&str]| {
        let error = Agent::builder("a")
            .backends(names.iter().copied())
            .registry(registry.clone())
            .build()
            .unwrap_err();
        (error.kind(), error.to_string())
    };
    for name in ["UXC", "LIBFABRIC", "NIXL", "ucx"] {
        assert_eq!(refused(&[name]), sentence(&registry, name));
    }
    // One misspelt name fails the whole list, so that an agent does not run over an unintended
    // backend.
    assert_eq!(refused(&["WIRE", "UXC"]), sentence(&registry, "UXC"));
    let (kind, both) = refused(&["UCX", "LIBFABRIC"]);
    assert_eq!(kind, ErrorKind::NoRoute);
    for name in ["UCX", "LIBFABRIC"] {
        assert!(both.contains(&sentence(&registry, name).1), "{both}");
    }
    let (kind, empty) = refused(&[]);
    assert_eq!(kind, ErrorKind::Invalid);
    assert!(empty.contains("an empty list of backends"), "{empty}");
}

/// A stub with another admission.
struct Admits(Stub, Admission);

impl Factory for Admits {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn placement(&self) -> Placement {
        self.0.placement()
    }

    fn admission(&self) -> Admission {
        self.1
    }

    fn available(&self, options: &Options) -> Result<Availability, Unavailable> {
        self.0.available(options)
    }

    fn open(&self, context: Context) -> Result<Arc<dyn Transport>> {
        self.0.open(context)
    }
}

#[test]
fn with_a_secret_a_library_that_checks_none_opens_only_if_named_unauthenticated() {
    let mut registry = Registry::new().with_names(KNOWN);
    registry.add(Admits(Stub::working("RIXL", 1), Admission::Open)).unwrap();
    registry.add(Admits(Stub::working("WIRE", 2), Admission::Keys)).unwrap();
    registry.add(Stub::working("SILENT", 3)).unwrap();
    let secret = || Secret::from_bytes([7; 32]);
    let opens = |name: &str, secret: Option<Secret>, options: &str| {
        let builder =
            Agent::builder("agent").backends([name]).options(Options::parse(options).unwrap());
        let builder = match secret {
            Some(secret) => builder.secret(secret),
            None => builder,
        };
        let error = builder.registry(registry.clone()).build().expect_err("stubs open nothing");
        (error.kind(), error.to_string())
    };
    let opened = ErrorKind::Unsupported;
    assert_eq!(opens("WIRE", Some(secret()), "{}").0, opened);
    for name in ["RIXL", "SILENT"] {
        assert_eq!(opens(name, None, "{}").0, opened);
        let (kind, sentence) = opens(name, Some(secret()), "{}");
        assert_eq!(kind, ErrorKind::Authentication, "{sentence}");
        for words in [&format!("\"unauthenticated\": [\"{name}\"]"), "vLLM's need that"] {
            assert!(sentence.contains(words), "{sentence}");
        }
    }
    for named in [r#"["RIXL"]"#, r#""nixl""#, r#"["WIRE", "Nixl"]"#] {
        let options = format!(r#"{{"unauthenticated": {named}}}"#);
        assert_eq!(opens("nixl", Some(secret()), &options).0, opened, "{named}");
    }
    let (kind, _) = opens("RIXL", Some(secret()), r#"{"unauthenticated": ["RIXXL"]}"#);
    assert_eq!(kind, ErrorKind::UnknownBackend);
}
