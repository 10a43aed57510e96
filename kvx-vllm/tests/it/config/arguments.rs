//! Dotted arguments, `+` appends and their precedence: every example of vLLM's parser, and the
//! differences of kvx.

use kvx_testkit::test;
use kvx_vllm::config::{
    Concern, Given, KvTransferConfig, Surroundings, ValueSource, dotted_arguments,
};
use serde_json::{Value, json};

use super::LIBFABRIC_COMMAND;

/// Returns the merged object, the other arguments and the warnings.
fn parse(line: &[&str]) -> (Value, Vec<String>, Vec<Concern>) {
    let (given, rest) =
        Given::from_arguments(line.iter().copied()).unwrap_or_else(|e| panic!("{line:?}: {e}"));
    let concerns = given.warnings().iter().map(kvx_vllm::config::Warning::concern).collect();
    (Value::Object(given.object().clone()), rest, concerns)
}

fn refused(line: &[&str]) -> String {
    match Given::from_arguments(line.iter().copied()) {
        Ok((given, _)) => panic!("{line:?} was accepted: {:?}", given.object()),
        Err(error) => error.to_string(),
    }
}

/// Returns the value of `--kv-transfer-config.a` with this text.
fn value(text: &str) -> Value {
    parse(&[&format!("--kv-transfer-config.a={text}")]).0["a"].clone()
}

#[test]
fn the_guides_example_selects_libfabric() {
    let line = LIBFABRIC_COMMAND.into_iter().skip(1);
    let (config, rest) = KvTransferConfig::from_arguments(line, &Surroundings::default()).unwrap();
    assert_eq!(rest, ["serve", "MODEL"]);
    assert_eq!(config.backends().unwrap().unwrap(), ["LIBFABRIC"]);
    assert!(config.is_kv_producer() && config.is_kv_consumer());
}

#[test]
fn the_value_may_follow_or_stand_behind_an_equals_sign() {
    let expected = json!({"a": {"b": {"c": 1}}});
    assert_eq!(parse(&["--kv-transfer-config.a.b.c", "1"]).0, expected);
    assert_eq!(parse(&["--kv-transfer-config.a.b.c=1"]).0, expected);
    assert_eq!(parse(&["--kv-transfer-config.a=x=y"]).0, json!({"a": "x=y"}));
    assert_eq!(parse(&["--kv-transfer-config.a", "-1"]).0, json!({"a": -1}));
    assert_eq!(parse(&["--kv-transfer-config", r#"{"a": 1k}"#]).0, json!({"a": 1000}));
    assert_eq!(parse(&[r#"--kv_transfer_config={"a.b": "c=d"}"#]).0, json!({"a.b": "c=d"}));
}

#[test]
fn underscores_are_dashes_before_the_first_dot_only() {
    assert_eq!(parse(&["--kv_transfer_config.kv_port=1"]).0, json!({"kv_port": 1}));
    assert_eq!(parse(&["--kv-transfer_config.kv_port=1"]).0, json!({"kv_port": 1}));
    assert_eq!(
        parse(&["--kv-transfer-config.kv-ip", "127.0.0.1"]).0,
        json!({"kv-ip": "127.0.0.1"})
    );
}

#[test]
fn a_value_is_json_else_a_human_number_else_text() {
    for (text, meant) in [
        ("1k", json!(1000)),
        ("80G", json!(85_899_345_920_u64)),
        ("1.5k", json!(1500)),
        ("1", json!(1)),
        ("1.5", json!(1.5)),
        ("true", json!(true)),
        ("True", json!("True")),
        ("null", json!(null)),
        ("127.0.0.1", json!("127.0.0.1")),
        ("\"q\"", json!("q")),
        ("\"007\"", json!("007")),
        ("007", json!(7)),
        ("1_000", json!(1000)),
        ("", json!("")),
        ("a,b", json!("a,b")),
        ("[1, \"x\"]", json!([1, "x"])),
        ("{\"b\": 2}", json!({"b": 2})),
        ("kv_both", json!("kv_both")),
    ] {
        assert_eq!(value(text), meant, "{text}");
    }
}

#[test]
fn a_plus_appends_strings_and_repeats_add_up() {
    let key = |suffix: &str| format!("--kv-transfer-config.a+{suffix}");
    assert_eq!(parse(&[&key(""), "1,2"]).0, json!({"a": ["1", "2"]}));
    assert_eq!(parse(&[&key("=1,2")]).0, json!({"a": ["1", "2"]}));
    assert_eq!(parse(&[&key(""), ""]).0, json!({"a": [""]}));
    assert_eq!(parse(&[&key("=x"), &key("=y,z")]).0, json!({"a": ["x", "y", "z"]}));
    assert_eq!(
        parse(&["--kv-transfer-config.a=[1]", "--kv-transfer-config.a=[2]"]).0,
        json!({"a": [1, 2]})
    );
    assert_eq!(parse(&["--kv-transfer-config.a=[1]", &key("=x")]).0, json!({"a": [1, "x"]}));
}

#[test]
fn objects_merge_and_otherwise_the_last_wins_with_a_warning() {
    let (object, _, concerns) =
        parse(&["--kv-transfer-config.a={\"x\": {\"y\": 1}}", "--kv-transfer-config.a.x.z", "2"]);
    assert_eq!((object, concerns), (json!({"a": {"x": {"y": 1, "z": 2}}}), vec![]));
    let (object, _, concerns) =
        parse(&["--kv-transfer-config.a", "1", "--kv-transfer-config.a.b", "2"]);
    assert_eq!((object, concerns), (json!({"a": {"b": 2}}), vec![Concern::Duplicate]));
    let (given, _) =
        Given::from_arguments(["--kv-transfer-config.a.b=1", "--kv-transfer-config.a.b=2"])
            .unwrap();
    assert_eq!(Value::Object(given.object().clone()), json!({"a": {"b": 2}}));
    assert_eq!(
        given.warnings()[0].sentence(),
        "set more than once by dotted arguments: a.b; the last one counts"
    );
}

#[test]
fn of_two_json_objects_the_last_counts_with_a_warning() {
    let (object, _, concerns) =
        parse(&["--kv-transfer-config", r#"{"a": 1}"#, "--kv-transfer-config", r#"{"b": 2}"#]);
    assert_eq!((object, concerns), (json!({"b": 2}), vec![Concern::Duplicate]));
}

#[test]
fn dotted_arguments_merge_into_the_json_with_a_warning_that_vllm_differs() {
    let json = r#"{"kv_role": "kv_both", "e": {"backends": ["UCX"], "n": 1}}"#;
    let expected = json!({"kv_role": "kv_producer", "e": {"backends": ["UCX", "TCP"], "n": 1}});
    let role = "--kv-transfer-config.kv_role=kv_producer";
    let append = "--kv-transfer-config.e.backends+=TCP";
    for line in [
        vec!["--kv-transfer-config", json, role, append],
        vec![role, append, "--kv-transfer-config", json],
        vec![append, "--kv-transfer-config", json, role],
    ] {
        let (object, rest, concerns) = parse(&line);
        assert_eq!(
            (object, rest.len(), concerns),
            (expected.clone(), 0, vec![Concern::Differs]),
            "{line:?}"
        );
    }
}

#[test]
fn a_missing_value_is_a_clear_error() {
    let name = "--kv-transfer-config.kv_role";
    for line in [vec![name], vec![name, "--port", "8100"], vec!["--kv-transfer-config"]] {
        let error = refused(&line);
        assert!(error.contains(" has no value; write "), "{error}");
    }
    assert_eq!(parse(&["--kv-transfer-config.a=--b"]).0, json!({"a": "--b"}));
}

#[test]
fn odd_numbers_and_broken_json_are_errors() {
    let (object, _, concerns) = parse(&["--kv-transfer-config.a=1.5K"]);
    assert_eq!((object, concerns), (json!({"a": "1.5K"}), vec![Concern::Text]));
    let (object, _, concerns) = parse(&["--kv-transfer-config.a=[UCX]"]);
    assert_eq!((object, concerns), (json!({"a": "[UCX]"}), vec![Concern::Text]));
    assert_eq!(parse(&["--kv-transfer-config.a={\"x\": 80m}"]).0, json!({"a": {"x": 80_000_000}}));
    assert!(refused(&["--kv-transfer-config.a=99999999999T"]).contains("does not fit in 64 bits"));
    assert!(
        refused(&["--kv-transfer-config", "{"])
            .starts_with("--kv-transfer-config: this is not JSON")
    );
    assert!(
        refused(&["--kv-transfer-config=NixlConnector"])
            .starts_with("--kv-transfer-config: this is not JSON")
    );
    assert!(refused(&["--kv-transfer-config.a..b=1"]).contains("has an empty key"));
    assert!(refused(&["--kv-transfer-config.=1"]).contains("has an empty key"));
    let deep = format!("--kv-transfer-config{}=1", ".a".repeat(100_000));
    assert!(refused(&[&deep]).contains("has 100000 keys; at most 32"));
}

#[test]
fn other_arguments_are_returned_in_order_and_a_bare_double_dash_ends_kvx_arguments() {
    let (object, rest, _) = parse(&[
        "serve",
        "--compilation-config.mode",
        "3",
        "--kv-transfer-config.a=1",
        "--url=http://h.example/x.y",
        "-O3",
        "--kv-transfer-configs.b=2",
        "--",
        "--kv-transfer-config.c=3",
    ]);
    assert_eq!(object, json!({"a": 1}));
    assert_eq!(
        rest,
        [
            "serve",
            "--compilation-config.mode",
            "3",
            "--url=http://h.example/x.y",
            "-O3",
            "--kv-transfer-configs.b=2",
            "--",
            "--kv-transfer-config.c=3"
        ]
    );
    let (given, _) = Given::from_arguments(["--port", "1"]).unwrap();
    assert!(given.is_empty());
}

#[test]
fn every_value_has_a_source() {
    let (given, _) = Given::from_arguments([
        "--kv-transfer-config",
        r#"{"kv_role": "kv_both", "e": {"backends": ["UCX"], "gone": {"x": 1, "y": 2}, "none": {}}}"#,
        "--kv_transfer_config.e.backends+=TCP",
        "--kv-transfer-config.e.gone",
        "0",
        "--kv-transfer-config.e.none.deep=1",
    ])
    .unwrap();
    let sources: Vec<(String, Vec<ValueSource>)> =
        given.sources().map(|(keys, sources)| (keys.join("."), sources.to_vec())).collect();
    let argument = |text: &str| ValueSource::Argument(text.to_owned());
    assert_eq!(
        sources,
        [
            (
                "e.backends".to_owned(),
                vec![ValueSource::Json, argument("--kv_transfer_config.e.backends+")]
            ),
            ("e.gone".to_owned(), vec![argument("--kv-transfer-config.e.gone")]),
            ("e.none.deep".to_owned(), vec![argument("--kv-transfer-config.e.none.deep")]),
            ("kv_role".to_owned(), vec![ValueSource::Json]),
        ]
    );
}

#[test]
fn keys_that_dotted_arguments_cannot_express_stay_json() {
    for object in [
        json!({"kv_role": "x", "e": {"a.b": 1, "c": {"d": []}}}),
        json!({"e": {"a=b": 1}, "f": {"g+": 2}, "h": {"": 3}}),
        json!({"": 1}),
        json!({}),
        json!({"e": {}, "l": [{"a.b": "1k"}], "s": "1k", "n": null, "t": "true", "q": "\"", "u": "é\n"}),
    ] {
        let object = object.as_object().unwrap();
        let arguments = dotted_arguments(object);
        assert!(arguments.iter().all(|argument| argument.starts_with("--kv-transfer-config")));
        let (given, rest) = Given::from_arguments(arguments).unwrap();
        assert_eq!((given.object(), rest.len()), (object, 0));
    }
}
