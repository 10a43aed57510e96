use std::fs;

use proptest::prelude::*;

use super::*;

const TABLE: u64 = 0x8000;

/// Returns the names of a complete table as in NIXL 1.x: destructors, three unknown functions in
/// the middle, and another one at the end.
fn whole() -> Vec<String> {
    let mangled = |name: &str| format!("_ZN10nixlMyImpl{}", name.replace('$', STRING));
    let mut names = vec!["_ZN10nixlMyImplD1Ev".to_owned(), "_ZN10nixlMyImplD0Ev".to_owned()];
    for (function, name) in NAMES {
        if function == PublicData {
            names.extend((0..3).map(|number| format!("_ZN17nixlBackendEngine{number}unknown")));
        }
        names.push(mangled(name));
    }
    names.push("_ZN10nixlMyImpl3ownEv".to_owned());
    names
}

/// Returns a shared library with such a table: sections for symbols, their names, and relocations.
fn file(names: &[String]) -> Vec<u8> {
    let mut strings = vec![0];
    let mut symbols = vec![0; 24];
    let mut symbol = |name: &str, value: u64, size: u64| {
        symbols.extend((strings.len() as u32).to_le_bytes());
        symbols.extend([0; 4]);
        symbols.extend(value.to_le_bytes());
        symbols.extend(size.to_le_bytes());
        strings.extend(name.bytes().chain([0]));
    };
    let mut relocations = Vec::new();
    for (at, name) in names.iter().enumerate() {
        let value = 0x1000 + at as u64;
        symbol(name, value, 1);
        relocations.extend((TABLE + 16 + 8 * at as u64).to_le_bytes());
        // By the symbol's number, and by its address: linkers write both forms.
        let (kind, index, address) = if at % 2 == 0 {
            (machine::ABSOLUTE, at as u32 + 1, 0)
        } else {
            (machine::RELATIVE, 0, value)
        };
        relocations.extend(kind.to_le_bytes());
        relocations.extend(index.to_le_bytes());
        relocations.extend(address.to_le_bytes());
    }
    symbol("_ZTV10nixlMyEngine", TABLE, 16 + 8 * names.len() as u64);
    let mut file = vec![0; 64];
    file[..6].copy_from_slice(b"\x7fELF\x02\x01");
    file[18..20].copy_from_slice(&machine::NUMBER.to_le_bytes());
    file[58..60].copy_from_slice(&64u16.to_le_bytes());
    let mut headers = vec![0; 64];
    for (kind, bytes, link) in
        [(DYNAMIC_SYMBOLS, symbols, 2u32), (3, strings, 0), (RELOCATIONS, relocations, 1)]
    {
        let mut header = vec![0; 64];
        header[4..8].copy_from_slice(&kind.to_le_bytes());
        header[24..32].copy_from_slice(&(file.len() as u64).to_le_bytes());
        header[32..40].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
        header[40..44].copy_from_slice(&link.to_le_bytes());
        headers.extend(header);
        file.extend(bytes);
    }
    let at = (file.len() as u64).to_le_bytes();
    file[40..48].copy_from_slice(&at);
    file[60..62].copy_from_slice(&4u16.to_le_bytes());
    file.extend(headers);
    file
}

/// A folder of plug-ins that is removed when it is dropped.
struct Folder(std::path::PathBuf);

impl Folder {
    fn new(name: &str, files: &[(&str, Vec<u8>)]) -> Folder {
        let folder = std::env::temp_dir().join(format!("kvx-nixl-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        for (name, bytes) in files {
            fs::write(folder.join(format!("libplugin_{name}.so")), bytes).unwrap();
        }
        Folder(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

fn refusal(name: &str, files: &[(&str, Vec<u8>)]) -> String {
    order_in(&Folder::new(name, files).0, false).unwrap_err().to_string()
}

#[test]
fn a_whole_table_gives_each_function_its_slot() {
    let order = order(&file(&whole())).unwrap();
    assert_eq!(order.slots().len(), 2 + FUNCTIONS + 3 + 1);
    assert_eq!(order.slots()[2], Some(SupportsRemote));
    assert_eq!(order.slots()[14..18], [Some(ReleaseReq), None, None, None]);
    assert_eq!(order.slots()[18], Some(PublicData));
    assert_eq!(order.slots()[24..], [Some(GenNotif), None]);
    assert!(order.is_known());
}

#[test]
fn a_table_that_lacks_a_function_is_refused() {
    let mut names = whole();
    names[12] = "_ZN10nixlMyImpl8postXferEv".to_owned(); // other parameters make it another function
    assert_eq!(
        refusal("lacks", &[("UCX", file(&names))]),
        "UCX: its table lacks the function PostXfer"
    );
}

#[test]
fn a_table_that_has_a_function_twice_is_refused() {
    let mut names = whole();
    names[16] = names[13].clone();
    assert_eq!(
        refusal("twice", &[("UCX", file(&names))]),
        "UCX: its table has the function CheckXfer twice"
    );
}

#[test]
fn swapped_functions_are_refused_unless_any_order_is_asked_for() {
    let mut names = whole();
    names.swap(13, 14);
    let folder = Folder::new("swapped", &[("UCX", file(&names))]);
    let why = order_in(&folder.0, false).unwrap_err().to_string();
    assert_eq!(why, "its plug-in UCX has the functions in an order that no tried release has");
    assert_eq!(
        order_in(&folder.0, true).unwrap().slots()[13..15],
        [Some(ReleaseReq), Some(CheckXfer)]
    );
    // An unknown function at an unexpected position shifts all functions after it.
    let mut names = whole();
    names.insert(5, "_ZN17nixlBackendEngine8unknownEv".to_owned());
    assert!(refusal("unknown", &[("UCX", file(&names))]).contains("no tried release"));
}

#[test]
fn as_many_unknown_functions_as_in_some_release_are_accepted() {
    for count in 0..10 {
        let mut names: Vec<_> =
            whole().into_iter().filter(|name| !name.ends_with("unknown")).collect();
        let public = names.iter().position(|name| name.contains("getPublicData")).unwrap();
        let unknown = (0..count).map(|number| format!("_ZN17nixlBackendEngine{number}unknown"));
        names.splice(public..public, unknown);
        assert_eq!(order(&file(&names)).unwrap().is_known(), [3, 4, 7].contains(&count), "{count}");
    }
}

#[test]
fn plug_ins_of_one_folder_have_to_agree() {
    let short = whole()[..whole().len() - 1].to_vec();
    let folder = Folder::new("agree", &[("UCX", file(&short)), ("POSIX", file(&whole()))]);
    assert_eq!(order_in(&folder.0, false).unwrap().slots().len(), 26, "slots for the longer one");
    let mut shifted = whole();
    shifted.remove(15);
    let why = refusal("differ", &[("UCX", file(&whole())), ("POSIX", file(&shifted))]);
    assert_eq!(why, "its plug-ins UCX and POSIX have their functions in different orders");
    let cut = file(&whole())[..500].to_vec();
    assert_eq!(
        refusal("cut", &[("UCX", cut), ("POSIX", file(&whole()))]),
        "UCX: it is cut off or damaged"
    );
}

#[test]
fn a_folder_without_plug_ins_and_other_files_are_refused() {
    assert!(refusal("none", &[]).contains("has none of the plug-ins"));
    for other in [&b""[..], b"\x7fELF", b"#!/bin/sh\n", &[0; 4096]] {
        assert_eq!(
            refusal("other", &[("OBJ", other.to_vec())]),
            "OBJ: it is no shared library of this machine"
        );
    }
}

#[test]
fn every_truncation_is_refused() {
    let whole = file(&whole());
    for len in 0..whole.len() {
        assert!(order(&whole[..len]).is_err(), "{len}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, ..ProptestConfig::default() })]

    /// For any damage, the result is an order or a refusal, without noticeable time or memory.
    #[test]
    fn damage_is_an_order_or_a_refusal(
        places in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut file = file(&whole());
        for (place, byte) in places {
            let at = place.index(file.len());
            file[at] = byte;
        }
        if let Ok(order) = order(&file) {
            prop_assert_eq!(order.slots().iter().flatten().count(), FUNCTIONS);
        }
    }

    /// Offsets that lead out of the file, or to the limits.
    #[test]
    fn wild_numbers_are_an_order_or_a_refusal(
        words in prop::collection::vec((any::<prop::sample::Index>(), prop::sample::select(vec![
            0u64, 1, 7, 24, u64::from(u32::MAX), u64::MAX, u64::MAX - 23, i64::MAX as u64, 1 << 40, TABLE, TABLE + 8,
        ])), 1..4),
    ) {
        let mut file = file(&whole());
        for (place, word) in words {
            let at = place.index(file.len() / 8) * 8;
            if let Some(bytes) = file.get_mut(at..at + 8) {
                bytes.copy_from_slice(&word.to_le_bytes());
            }
        }
        drop(order(&file));
    }
}
