//! Generates docs/project/vllm-parity.md: what vLLM's own tests assert and its guides say, and the
//! tests of kvx that hold it.
//!
//! A test is annotated by a comment above it: `// vLLM 12, 13: what holds`, or
//! `// vLLM guide R1: what holds` for a command or rule of the guides. Further lines of an
//! annotation are indented. `KVX_WRITE_PAGES=1` has this test write the page.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use kvx_testkit::test;

const PAGE: &str = "docs/project/vllm-parity.md";

/// The sections of the checklist, by their first items.
const SECTIONS: &[(u32, &str)] = &[
    (1, "Handshake and hash"),
    (10, "Transfers"),
    (23, "Failures"),
    (33, "Life cycle and leases"),
    (40, "Peers"),
    (43, "Mapping and groups"),
    (46, "Bidirectional, push, statistics"),
    (49, "Whole deployments"),
    (55, "MooncakeConnector"),
];

/// Items, or parts of them, that no test holds, with the reason.
const ABSENT: &[(&str, &str)] = &[
    ("7", "NVFP4: heads of packed 4-bit blocks are not divided; a peer that needs it is refused"),
    ("42", "sleep and wake beyond the counter of registrations: the engine's own business"),
    (
        "43, 45",
        "Mamba and decode context parallelism beyond the golden tables: ranks are mapped; \
         state-space blocks and unequal DCP sizes are refused",
    ),
    ("48", "statistics of vLLM's MultiConnector for each of its children"),
    (
        "49",
        "accuracy of whole models (gsm8k) needs GPUs and downloads; answers are compared instead",
    ),
    ("50", "edge cases of a live vLLM pair: `cargo xtask interop vllm`, which is opt-in"),
    ("51", "MultiConnector is not implemented, and refused"),
    ("52", "state-space models are refused, and speculative decoding is the engine's"),
    ("53", "vLLM's probe script asks for metadata of a rank, as `kvx probe` does"),
    ("54", "Intel XPUs: no hardware"),
    (
        "63",
        "MooncakeConnector with layers of several KV cache groups in one region, and \
         `prefill_side_swa_replay`",
    ),
];

/// An annotated test.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Row {
    items: Vec<u32>,
    /// The command or rule of a guide, where there are no items.
    guide: String,
    file: String,
    /// The annotation's place in its file.
    place: usize,
    holds: String,
    test: String,
}

/// Returns the root of the repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Returns the sources below a folder, relative to the root.
fn sources(folder: &str) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(root().join(folder)).unwrap().map(Result::unwrap) {
        let name = entry.file_name().into_string().unwrap();
        let path = if folder.is_empty() { name.clone() } else { format!("{folder}/{name}") };
        if entry.file_type().unwrap().is_dir() {
            if !name.starts_with('.') && name != "target" {
                found.append(&mut sources(&path));
            }
        } else if name.ends_with(".rs") {
            found.push(path);
        }
    }
    found
}

/// Returns the name of the test that begins here: a function's, or a quoted one in a list.
fn name_of_test<'a>(lines: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    lines.take(12).find_map(|line| {
        let of_function = line.split_once("fn ").and_then(|(_, rest)| rest.split_once('('));
        let quoted = || line.split('"').nth(1);
        let name = of_function.map(|(name, _)| name).or_else(quoted)?;
        (!name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || c == '_')).then_some(name)
    })
}

/// Returns the annotated tests of a source file.
fn rows(file: &str, source: &str) -> Vec<Row> {
    let lines: Vec<_> = source.lines().map(str::trim).collect();
    let mut rows = Vec::new();
    for (place, line) in lines.iter().enumerate() {
        let Some(annotation) = line.strip_prefix("// vLLM ") else { continue };
        let Some((of, first)) = annotation.split_once(": ") else { continue };
        let items: Option<Vec<u32>> = of.split(", ").map(|item| item.parse().ok()).collect();
        let guide = of.strip_prefix("guide ");
        if items.is_none() && guide.is_none() {
            continue;
        }
        let more = lines[place + 1..].iter().map_while(|line| line.strip_prefix("//     "));
        let holds = std::iter::once(first).chain(more).collect::<Vec<_>>().join(" ");
        let below = lines[place + 1..].iter().copied().filter(|line| !line.starts_with("//"));
        let test = name_of_test(below).unwrap_or_else(|| panic!("{file}: no test below {line}"));
        let (test, guide) = (test.to_owned(), guide.unwrap_or_default().to_owned());
        assert!(has_test(source, &test), "{file}: {test} is no test");
        rows.push(Row {
            items: items.unwrap_or_default(),
            guide,
            file: file.into(),
            place,
            holds,
            test,
        });
    }
    rows
}

/// Returns whether a file has a test function with this name.
fn has_test(source: &str, function: &str) -> bool {
    // A test program with its own main lists its trials by name, on one line or on several, with
    // annotations in between.
    let flat: String = source.lines().filter(|line| !line.trim().starts_with("//")).collect();
    let flat: String = flat.split_whitespace().collect();
    if flat.contains(&format!("(\"{function}\","))
        || flat.contains(&format!("name:\"{function}\","))
    {
        return true;
    }
    // A program with async tests lists functions that are `async` and take no arguments.
    if source.contains(&format!("pub(crate) async fn {function}() {{")) {
        return true;
    }
    let lines: Vec<_> = source.lines().map(str::trim).collect();
    let named = lines.iter().position(|line| line.starts_with(&format!("fn {function}(")));
    let Some(at) = named else { return false };
    let above =
        lines[..at].iter().rev().take_while(|line| line.starts_with('#') || line.starts_with("//"));
    above.into_iter().any(|line| ["#[test]", "#[test(own_process)]"].contains(line))
}

fn all_rows() -> Vec<Row> {
    let mut rows: Vec<_> = sources("")
        .iter()
        .filter(|file| !file.ends_with("parity.rs")) // it has examples
        .flat_map(|file| rows(file, &std::fs::read_to_string(root().join(file)).unwrap()))
        .collect();
    rows.sort();
    rows
}

/// Returns the page.
fn generate(rows: &[Row]) -> String {
    let mut page = "# What vLLM's tests assert, and what holds it here\n\n\
        Generated from annotations at the tests (`kvx-vllm/tests/it/parity.rs` says how); do not\n\
        edit. The numbers are those of the acceptance checklist of vLLM's connectors (its unit\n\
        tests, 0.33.0), items 1 to 65.\n"
        .to_owned();
    let row = |page: &mut String, of: &str, row: &Row| {
        writeln!(page, "| {of} | {} | `{}::{}` |", row.holds, row.file, row.test).unwrap();
    };
    let ends = SECTIONS[1..].iter().map(|section| section.0).chain([u32::MAX]);
    for ((from, name), to) in SECTIONS.iter().zip(ends) {
        let of_it =
            rows.iter().filter(|row| row.items.first().is_some_and(|of| (*from..to).contains(of)));
        let of_it: Vec<_> = of_it.collect();
        if !of_it.is_empty() {
            write!(page, "\n## {name}\n\n| item | what holds | test |\n|---|---|---|\n").unwrap();
        }
        for of_section in of_it {
            let items: Vec<_> = of_section.items.iter().map(u32::to_string).collect();
            row(&mut page, &items.join(", "), of_section);
        }
    }
    page.push_str("\n## Absent\n\n| item | what, and why |\n|---|---|\n");
    for (items, why) in ABSENT {
        writeln!(page, "| {items} | {why} |").unwrap();
    }
    page.push_str(
        "\n## Guides\n\n\
         Every command of vLLM's guides of NixlConnector (an older and a newer one) and of\n\
         MooncakeConnector, run by `kvx serve` and `kvx proxy` with variables and arguments as\n\
         they are, in network namespaces for hosts; and the rules that the guides state. The\n\
         commands are in `kvx-cli/tests/it/serve/guides.json`.\n\n\
         | command or rule | what holds | test |\n|---|---|---|\n",
    );
    for of_guide in rows.iter().filter(|row| row.items.is_empty()) {
        row(&mut page, &format!("`{}`", of_guide.guide), of_guide);
    }
    page
}

#[test]
fn the_page_is_what_the_annotations_say() {
    let (page, generated) = (root().join(PAGE), generate(&all_rows()));
    if std::env::var_os("KVX_WRITE_PAGES").is_some() {
        std::fs::write(&page, generated).unwrap();
        return;
    }
    let written = std::fs::read_to_string(&page).unwrap();
    assert!(
        written == generated,
        "{PAGE} is out of date: KVX_WRITE_PAGES=1 cargo test -p kvx-vllm --test it parity"
    );
}

#[test]
fn every_item_of_the_checklist_has_a_test_or_a_reason() {
    let held: BTreeSet<_> = all_rows().into_iter().flat_map(|row| row.items).collect();
    assert_eq!(held, (1..=48).chain(55..=65).collect());
    let absent = ABSENT.iter().flat_map(|(items, _)| items.split(", "));
    let absent: BTreeSet<u32> = absent.map(|item| item.parse().unwrap()).collect();
    assert!((49..=54).all(|item| absent.contains(&item)), "{absent:?}");
}

#[test]
fn an_annotation_names_the_test_below_it() {
    let source = "\
        // vLLM 12, 13: one thing\n\
        //     and another\n\
        #[test]\n\
        fn a_test() {}\n\
        // vLLM guide R1: a rule\n\
        (\"listed\", runs),\n";
    let rows = rows("file.rs", source);
    let found: Vec<_> =
        rows.iter().map(|row| (&row.items[..], &*row.guide, &*row.holds, &*row.test)).collect();
    assert_eq!(
        found,
        [
            (&[12, 13][..], "", "one thing and another", "a_test"),
            (&[][..], "R1", "a rule", "listed")
        ]
    );
    assert!(!has_test("fn no_test() {}", "no_test"), "a function, but no test");
}
