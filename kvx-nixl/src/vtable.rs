//! The order of a NIXL's table of virtual functions, read from the file of a plug-in that is part
//! of it.
//!
//! The number of NIXL's plug-in interface has been 1 in all releases, although functions were added
//! to and removed from the middle of the table: 28 until 0.9, 31 in 0.10, 27 since 1.0. The dynamic
//! symbols of a plug-in name the function of each slot, with the types of its parameters. The file
//! is only read, and not trusted: each number is checked before it is used.

use std::collections::HashMap;
use std::fmt;
use std::path::Path;

use kvx_backend::elf::Elf;

use Function::*;

/// The functions that KVX implements, in the order that all releases have kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
#[allow(missing_docs, reason = "the names are NIXL's")]
pub enum Function {
    SupportsRemote,
    SupportsLocal,
    SupportsNotif,
    SupportedMems,
    RegisterMem,
    DeregisterMem,
    Connect,
    Disconnect,
    UnloadMd,
    PrepXfer,
    PostXfer,
    CheckXfer,
    ReleaseReq,
    PublicData,
    ConnInfo,
    LoadRemoteConnInfo,
    LoadRemoteMd,
    LoadLocalMd,
    GetNotifs,
    GenNotif,
}

/// The number of functions.
pub const FUNCTIONS: usize = 20;

/// The suffixes of their mangled names: the function's name and the types of its parameters. `$` is
/// `std::string`.
const NAMES: [(Function, &str); FUNCTIONS] = [
    (SupportsRemote, "14supportsRemoteEv"),
    (SupportsLocal, "13supportsLocalEv"),
    (SupportsNotif, "13supportsNotifEv"),
    (SupportedMems, "16getSupportedMemsEv"),
    (RegisterMem, "11registerMemERK12nixlBlobDescRK10nixl_mem_tRP13nixlBackendMD"),
    (DeregisterMem, "13deregisterMemEP13nixlBackendMD"),
    (Connect, "7connectERK$"),
    (Disconnect, "10disconnectERK$"),
    (UnloadMd, "8unloadMDEP13nixlBackendMD"),
    (
        PrepXfer,
        "8prepXferERK14nixl_xfer_op_tRK12nixlDescListI12nixlMetaDescES7_RK$RP15nixlBackendReqHPK23nixlBackendOptionalArgs",
    ),
    (
        PostXfer,
        "8postXferERK14nixl_xfer_op_tRK12nixlDescListI12nixlMetaDescES7_RK$RP15nixlBackendReqHPK23nixlBackendOptionalArgs",
    ),
    (CheckXfer, "9checkXferEP15nixlBackendReqH"),
    (ReleaseReq, "11releaseReqHEP15nixlBackendReqH"),
    (PublicData, "13getPublicDataEPK13nixlBackendMDR$"),
    (ConnInfo, "11getConnInfoER$"),
    (LoadRemoteConnInfo, "18loadRemoteConnInfoERK$S7_"),
    (LoadRemoteMd, "12loadRemoteMDERK12nixlBlobDescRK10nixl_mem_tRK$RP13nixlBackendMD"),
    (LoadLocalMd, "11loadLocalMDEP13nixlBackendMDRS1_"),
    (GetNotifs, "9getNotifsERSt6vectorISt4pairI$S7_ESaIS8_EE"),
    (GenNotif, "8genNotifERK$S7_"),
];
const STRING: &str = "NSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE";

/// Plug-ins that are part of NIXL and depend on no missing library.
pub const PLUGINS: [&str; 4] = ["UCX", "POSIX", "OBJ", "LIBFABRIC"];

/// The maximum number of slots of a table. NIXL's has 27 to 31.
pub const MAX_SLOTS: usize = 64;
const MAX_FILE: u64 = 256 << 20;
const MAX_SECTIONS: usize = 4096;
const MAX_SYMBOLS: usize = 1 << 20;
const MAX_RELOCATIONS: usize = 1 << 22;
/// The maximum number of names of one function that are checked.
const MAX_NAMES: usize = 64;

/// The reason why a table is rejected, in one sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableRefusal(pub String);

impl fmt::Display for TableRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn refuse<T>(why: impl Into<String>) -> Result<T, TableRefusal> {
    Err(TableRefusal(why.into()))
}

/// The number of slots for destructors, at the start.
pub const DESTRUCTORS: usize = 2;

/// The number of GPU functions between `releaseReqH` and `getPublicData` in the releases: since
/// 1.0, until 0.9, and in 0.10.
const GPU_SLOTS: [usize; 3] = [3, 4, 7];

/// The content of each slot of the table: a function of KVX, or none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotOrder(Vec<Option<Function>>);

impl SlotOrder {
    /// Returns the slots.
    pub fn slots(&self) -> &[Option<Function>] {
        &self.0
    }

    /// Returns whether KVX's functions are in the same slots in both.
    pub(crate) fn agrees(&self, other: &SlotOrder) -> bool {
        let placed = |order: &SlotOrder| {
            order.0.iter().rposition(Option::is_some).map_or(0, |last| last + 1)
        };
        let (ours, theirs) = (placed(self), placed(other));
        self.0[..ours] == other.0[..theirs]
    }

    /// Returns whether the functions are in the order of all tested releases, with unknown
    /// functions only where those have some: the destructors, the GPU functions between
    /// `releaseReqH` and `getPublicData`, and any at the end.
    fn is_known(&self) -> bool {
        let is_unknown = |at: usize| self.0[at].is_none();
        let all: Vec<_> = self.0.iter().flatten().copied().collect();
        let place =
            |function| self.0.iter().position(|slot| *slot == Some(function)).unwrap_or(usize::MAX);
        let (release, public, last) = (place(ReleaseReq), place(PublicData), place(GenNotif));
        let between = public.checked_sub(release).and_then(|more| more.checked_sub(1));
        all.is_sorted()
            && between.is_some_and(|between| GPU_SLOTS.contains(&between))
            && (0..self.0.len())
                .filter(|at| is_unknown(*at))
                .all(|at| at < DESTRUCTORS || (release..public).contains(&at) || at > last)
    }
}

/// Returns the order of the slots in the plug-ins of this folder, which must all agree.
///
/// # Errors
/// No plug-in there shows the order, two of them differ, or, unless `any` is set, no tested release
/// has that order.
pub fn order_in(folder: &Path, any: bool) -> Result<SlotOrder, TableRefusal> {
    let mut found: Option<(&str, SlotOrder)> = None;
    let mut reasons = Vec::new();
    for name in PLUGINS {
        let path = folder.join(format!("libplugin_{name}.so"));
        let file = match std::fs::metadata(&path) {
            Ok(file) if file.len() > MAX_FILE => {
                return refuse(format!("{} is too long to be a plug-in", path.display()));
            }
            Ok(_) => std::fs::read(&path),
            Err(_) => continue,
        };
        let order =
            file.map_err(|error| TableRefusal(error.to_string())).and_then(|file| order(&file));
        match (order, &found) {
            (Err(why), _) => reasons.push(format!("{name}: {why}")),
            (Ok(order), None) => found = Some((name, order)),
            // A plug-in may have further functions after NIXL's: slots for all of them are
            // harmless.
            (Ok(order), Some((_, first))) if order.agrees(first) => {
                if order.0.len() > first.0.len() {
                    found = Some((name, order));
                }
            }
            (Ok(_), Some((first, _))) => {
                return refuse(format!(
                    "its plug-ins {first} and {name} have their functions in different orders"
                ));
            }
        }
    }
    match found {
        // One plug-in's table is complete and another's is not: one of them does not belong to this
        // NIXL.
        Some(_) if !reasons.is_empty() => refuse(reasons.join("; ")),
        Some((name, order)) if !any && !order.is_known() => refuse(format!(
            "its plug-in {name} has the functions in an order that no tried release has"
        )),
        Some((_, order)) => Ok(order),
        None if reasons.is_empty() => {
            refuse(format!("{} has none of the plug-ins {}", folder.display(), PLUGINS.join(", ")))
        }
        None => refuse(reasons.join("; ")),
    }
}

/// Returns the order of the slots in one plug-in's file.
///
/// # Errors
/// The file is not a shared library for this machine, or it has no backend table with each function
/// exactly once.
pub fn order(file: &[u8]) -> Result<SlotOrder, TableRefusal> {
    let mut found: Option<SlotOrder> = None;
    for table in tables(file)?.iter().filter(|table| is_of_a_backend(table)) {
        let order = place(table)?;
        match &found {
            Some(first) if !first.agrees(&order) => {
                return refuse("two of its tables have the functions in different orders");
            }
            Some(first) if first.0.len() >= order.0.len() => {}
            _ => found = Some(order),
        }
    }
    found.ok_or_else(|| TableRefusal("it has no table of a backend's functions".into()))
}

/// Returns whether a table has most of the functions. NIXL's base class has the few that need no
/// backend.
fn is_of_a_backend(table: &[Vec<&str>]) -> bool {
    let has = |name: &str| table.iter().flatten().any(|symbol| symbol.ends_with(name));
    NAMES.iter().filter(|(_, name)| has(&name.replace('$', STRING))).count() > FUNCTIONS / 2
}

/// Returns the function of each slot. Errors: a function is missing or in two slots, or a slot has
/// two functions.
fn place(table: &[Vec<&str>]) -> Result<SlotOrder, TableRefusal> {
    let names = NAMES.map(|(function, name)| (function, name.replace('$', STRING)));
    let Some(slots) = table.get(2..).filter(|slots| slots.len() <= MAX_SLOTS) else {
        return refuse(format!(
            "its table has {} slots: kvx supports 2 to {}",
            table.len(),
            MAX_SLOTS + 2
        ));
    };
    if slots.len() < DESTRUCTORS {
        return refuse("its table has no destructors");
    }
    let mut order = vec![None; slots.len()];
    for (function, name) in &names {
        let mut places = (DESTRUCTORS..slots.len())
            .filter(|at| slots[*at].iter().any(|symbol| symbol.ends_with(name.as_str())));
        match (places.next(), places.next()) {
            (Some(at), None) if order[at].is_none() => order[at] = Some(*function),
            (Some(_), None) => {
                return refuse(format!(
                    "one slot of its table has two functions, {function:?} and another"
                ));
            }
            (Some(_), Some(_)) => {
                return refuse(format!("its table has the function {function:?} twice"));
            }
            (None, _) => return refuse(format!("its table lacks the function {function:?}")),
        }
    }
    Ok(SlotOrder(order))
}

#[cfg(target_arch = "aarch64")]
mod machine {
    pub(super) const NUMBER: u16 = 183;
    pub(super) const ABSOLUTE: u32 = 257;
    pub(super) const RELATIVE: u32 = 1027;
}
#[cfg(not(target_arch = "aarch64"))]
mod machine {
    pub(super) const NUMBER: u16 = 62;
    pub(super) const ABSOLUTE: u32 = 1;
    pub(super) const RELATIVE: u32 = 8;
}

const DYNAMIC_SYMBOLS: u32 = 11;
const RELOCATIONS: u32 = 4;

struct Section {
    kind: u32,
    offset: u64,
    size: u64,
    link: u32,
}

struct Symbol<'a> {
    name: &'a str,
    value: u64,
    size: u64,
}

fn sections(elf: Elf<'_>) -> Option<Vec<Section>> {
    let (headers, size, count) = (elf.u64(40)?, u64::from(elf.u16(58)?), usize::from(elf.u16(60)?));
    if size < 64 || count > MAX_SECTIONS {
        return None;
    }
    (0..count as u64)
        .map(|number| {
            let at = headers.checked_add(number * size)?;
            elf.array::<64>(at)?; // it is complete
            let field = |offset: u64| at.checked_add(offset);
            Some(Section {
                kind: elf.u32(field(4)?)?,
                offset: elf.u64(field(24)?)?,
                size: elf.u64(field(32)?)?,
                link: elf.u32(field(40)?)?,
            })
        })
        .collect()
}

/// Returns the complete entries of a section, at most `most`.
fn entries(
    elf: Elf<'_>,
    section: &Section,
    most: usize,
) -> Option<impl Iterator<Item = u64> + use<>> {
    let end = section.offset.checked_add(section.size)?;
    let count = section.size / 24;
    let start = section.offset;
    (end <= elf.size() && count <= most as u64)
        .then(|| (0..count).map(move |number| start + number * 24))
}

/// Returns the symbols in each slot of each table `_ZTV…Engine`, including the two words before the
/// functions.
fn tables(file: &[u8]) -> Result<Vec<Vec<Vec<&str>>>, TableRefusal> {
    let Some(elf) = Elf::new(file).filter(|elf| elf.u16(18) == Some(machine::NUMBER)) else {
        return refuse("it is no shared library of this machine");
    };
    tables_of(elf).map_or_else(|| refuse("it is cut off or damaged"), Ok)
}

fn tables_of(elf: Elf<'_>) -> Option<Vec<Vec<Vec<&str>>>> {
    let sections = sections(elf)?;
    let dynamic = sections.iter().find(|section| section.kind == DYNAMIC_SYMBOLS)?;
    let strings = sections.get(dynamic.link as usize)?.offset;
    let symbol = |at: u64| {
        Some(Symbol {
            name: elf.text(strings.checked_add(u64::from(elf.u32(at)?))?)?,
            value: elf.u64(at + 8)?,
            size: elf.u64(at + 16)?,
        })
    };
    let symbols: Vec<Symbol<'_>> =
        entries(elf, dynamic, MAX_SYMBOLS)?.map(symbol).collect::<Option<_>>()?;
    let is_table = |symbol: &&Symbol<'_>| {
        let fits = (24..=8 * (MAX_SLOTS as u64 + 2)).contains(&symbol.size);
        symbol.name.starts_with("_ZTV")
            && symbol.name.ends_with("Engine")
            && symbol.value != 0
            && fits
    };
    let engines: Vec<_> = symbols.iter().filter(is_table).take(64).collect();
    let mut tables: Vec<Vec<Vec<&str>>> =
        engines.iter().map(|engine| vec![Vec::new(); (engine.size / 8) as usize]).collect();
    let mut by_value: HashMap<u64, Vec<&str>> = HashMap::new();
    for symbol in symbols.iter().filter(|symbol| symbol.value != 0) {
        by_value.entry(symbol.value).or_default().push(symbol.name);
    }
    let mut looked_at = 0;
    for section in sections.iter().filter(|section| section.kind == RELOCATIONS) {
        for at in entries(elf, section, MAX_RELOCATIONS)? {
            looked_at += 1;
            if looked_at > MAX_RELOCATIONS {
                return None; // overlapping sections, which no linker writes
            }
            let (offset, kind, index) = (elf.u64(at)?, elf.u32(at + 8)?, elf.u32(at + 12)?);
            let slot = engines.iter().zip(&mut tables).find_map(|(engine, table)| {
                let into = offset.checked_sub(engine.value).filter(|into| into % 8 == 0)?;
                table.get_mut((into / 8) as usize)
            });
            let Some(slot) = slot else { continue };
            if !slot.is_empty() {
                return None; // a slot is relocated once
            }
            match kind {
                machine::ABSOLUTE if index != 0 => slot.push(symbols.get(index as usize)?.name),
                machine::RELATIVE => slot
                    .extend(by_value.get(&elf.u64(at + 16)?).into_iter().flatten().take(MAX_NAMES)),
                _ => {}
            }
        }
    }
    Some(tables)
}

#[cfg(test)]
mod tests;
