//! Tests of the alert rules and the Grafana board in `deploy/monitoring`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use kvx_testkit::{output, test};
use serde_json::Value;

/// The variable with the path of Prometheus's `promtool`, which then checks the rules too.
const PROMTOOL: &str = "KVX_PROMTOOL";
/// Grafana's boards have this many columns.
const COLUMNS: u64 = 24;

fn path(file: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(file)
}

fn read(file: &str) -> String {
    std::fs::read_to_string(path(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// Returns the metrics that a text names, without the suffixes of histograms.
fn metrics(text: &str) -> BTreeSet<String> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let words = text.split(|c: char| !is_part(c));
    let metrics = words.filter(|word| word.starts_with("kvx_") || word.starts_with("vllm:"));
    let without_suffix = |word: &str| {
        let end = ["_bucket", "_sum", "_count"].iter().find_map(|end| word.strip_suffix(end));
        end.unwrap_or(word).to_owned()
    };
    metrics.map(without_suffix).collect()
}

/// Returns the rules of alerts: their names, and the text of each.
fn rules() -> BTreeMap<String, String> {
    let text = read("deploy/monitoring/alerts.yml");
    let rules = text.split("      - alert: ").skip(1);
    rules.map(|rule| (rule.lines().next().unwrap().to_owned(), rule.to_owned())).collect()
}

fn board() -> Value {
    serde_json::from_str(&read("deploy/monitoring/grafana.json")).unwrap()
}

#[test]
fn alerts_and_board_name_only_documented_metrics() {
    let documented = metrics(&read("docs/operations/metrics.md"));
    assert!(documented.len() > 50, "{documented:?}");
    for file in ["alerts.yml", "grafana.json"] {
        let named = metrics(&read(&format!("deploy/monitoring/{file}")));
        assert!(named.len() > 10, "{file}: {named:?}");
        let unknown: Vec<_> = named.difference(&documented).collect();
        assert!(unknown.is_empty(), "{file} names {unknown:?}");
    }
}

#[test]
fn each_alert_says_what_to_do() {
    let rules = rules();
    assert!(rules.len() > 10);
    for (name, rule) in &rules {
        for key in ["expr: ", "severity: ", "summary: ", "action: "] {
            assert!(rule.contains(key), "{name} has no {key}");
        }
        let outside: Vec<_> = rule.lines().filter(|line| line.contains('\t')).collect();
        assert!(outside.is_empty(), "{name}: {outside:?}");
    }
    let Some(promtool) = std::env::var_os(PROMTOOL) else {
        eprintln!("{PROMTOOL}=PATH lets promtool check the rules too");
        return;
    };
    let mut check = Command::new(promtool);
    check.arg("check").arg("rules").arg(path("deploy/monitoring/alerts.yml"));
    let checked = output(&mut check, Duration::from_secs(10));
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
}

#[test]
fn the_panels_of_the_board_are_whole_and_do_not_overlap() {
    let board = board();
    let panels = board["panels"].as_array().unwrap();
    let (mut ids, mut covered) = (BTreeSet::new(), BTreeSet::new());
    for panel in panels {
        let title = panel["title"].as_str().unwrap();
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{title} has the id of another");
        let at = |key: &str| panel["gridPos"][key].as_u64().unwrap();
        assert!(at("x") + at("w") <= COLUMNS, "{title} is too far to the right");
        for x in at("x")..at("x") + at("w") {
            for y in at("y")..at("y") + at("h") {
                assert!(covered.insert((x, y)), "{title} covers another");
            }
        }
        match panel["type"].as_str().unwrap() {
            "row" => {}
            "timeseries" => {
                assert_eq!(panel["datasource"]["uid"], "${source}", "{title}");
                let targets = panel["targets"].as_array().unwrap();
                let names: BTreeSet<_> = targets.iter().map(|one| one["refId"].as_str()).collect();
                assert!(!targets.is_empty() && names.len() == targets.len(), "{title}");
                for target in targets {
                    let expression = target["expr"].as_str().unwrap();
                    let count = |bracket: char| expression.matches(bracket).count();
                    assert_eq!(count('('), count(')'), "{title}: {expression}");
                }
            }
            other => panic!("{title} is a {other}"),
        }
    }
    assert!(panels.len() > 15);
}
