//! JSON to dotted arguments and back, for any object.

use kvx_testkit::test;
use kvx_vllm::config::{Given, dotted_arguments};
use proptest::prelude::*;
use serde_json::{Map, Value};

fn key() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => "[a-z_]{1,8}",
        // Keys that dotted arguments cannot express or could misread.
        1 => prop_oneof![Just(String::new()), Just("a.b".into()), Just("a=b".into()), Just("a+".into())],
        1 => any::<String>(),
    ]
}

fn leaf() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        // Fractions that every decimal parser reads exactly.
        any::<i32>().prop_map(|n| Value::from(f64::from(n) / 8.0)),
        any::<String>().prop_map(Value::from),
        "(true|null|1k|80G|1\\.5K|007|--x|\\{\\}|\\[1\\]|\"q\"|NaN| 1 )".prop_map(Value::from),
    ]
}

fn value() -> impl Strategy<Value = Value> {
    leaf().prop_recursive(5, 40, 5, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::btree_map(key(), inner, 0..5)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

fn object() -> impl Strategy<Value = Map<String, Value>> {
    prop::collection::btree_map(key(), value(), 0..6).prop_map(|map| map.into_iter().collect())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn dotted_arguments_rebuild_their_json(object in object()) {
        let text = Value::Object(object.clone()).to_string();
        let from_text = Given::from_json(&text).map_err(|error| TestCaseError::fail(error.to_string()))?;
        prop_assert_eq!(from_text.object(), &object);

        let arguments = dotted_arguments(&object);
        let (given, rest) =
            Given::from_arguments(arguments.clone()).map_err(|error| TestCaseError::fail(error.to_string()))?;
        prop_assert!(rest.is_empty(), "{:?}", rest);
        prop_assert_eq!(given.object(), &object, "{:?}", arguments);
        prop_assert!(given.warnings().is_empty(), "{:?}", given.warnings());
    }

    #[test]
    fn the_order_of_arguments_with_different_keys_does_not_matter(object in object(), swap in any::<u64>()) {
        let mut arguments = dotted_arguments(&object);
        let length = arguments.len();
        arguments.rotate_left((swap % length as u64) as usize);
        let (given, _) = Given::from_arguments(arguments).map_err(|error| TestCaseError::fail(error.to_string()))?;
        prop_assert_eq!(given.object(), &object);
    }
}
