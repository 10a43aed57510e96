//! Finds the reason for a differing compatibility hash by trying known values of one or two
//! factors.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use kvx_core::Result;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::python_json;
use super::{CompatibilityFactors, CompatibilityHash};
use crate::Version;
use crate::params::TransferMode;

/// A factor in which two engines differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The factor, as named in `kv_connector_extra_config.factors`.
    pub factor: &'static str,
    /// The local value, as JSON.
    pub here: String,
    /// The peer's value, as JSON.
    pub there: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is {} here and {} there", self.factor, self.here, self.there)
    }
}

/// The values of one factor, or of all factors that a version of vLLM decides, as JSON. `None` for
/// an absent factor.
struct Candidate {
    factor: &'static str,
    sets: Vec<(&'static str, Option<String>)>,
}

const DTYPES: &[&str] = &["torch.bfloat16", "torch.float16", "torch.float32"];
const CACHE_DTYPES: &[&str] = &[
    "auto",
    "bfloat16",
    "float16",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_inc",
    "fp8_ds_mla",
    "nvfp4",
];
const BACKENDS: &[&str] = &[
    "FLASH_ATTN",
    "FLASHINFER",
    "TRITON_ATTN",
    "CPU_ATTN",
    "FLEX_ATTENTION",
    "TREE_ATTN",
    "XFORMERS",
    "TORCH_SDPA",
    "FLASHMLA",
    "FLASHMLA_SPARSE",
    "FLASH_ATTN_MLA",
    "FLASHINFER_MLA",
    "CUTLASS_MLA",
    "TRITON_MLA",
    "ROCM_ATTN",
    "ROCM_AITER_FA",
    "ROCM_AITER_UNIFIED_ATTN",
    "ROCM_AITER_MLA",
    "ROCM_FLASH",
    "FLASH_ATTN_DIFFKV",
    "XPU_ATTN",
    "PALLAS",
];
const HEADS: &[u32] =
    &[1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 25, 28, 32, 36, 40, 48, 56, 64, 71, 96, 128];
const HEAD_SIZES: &[u32] = &[16, 32, 64, 80, 96, 112, 120, 128, 160, 192, 256, 512, 576];
/// The suffixes that builds of a release append to its number.
const BUILDS: &[&str] = &["", "+cpu", "+cu126", "+cu128", "+cu129", "+cu130", "+rocm700"];

/// Returns the differences that explain the peer's hash: in one known factor, or else in two.
/// Returns `None` if no known values of two factors do. The engines then differ in more factors, or
/// in an unknown value such as the model's name.
///
/// # Errors
///
/// As [`CompatibilityFactors::json`].
///
/// ```
/// use kvx_vllm::Version;
/// use kvx_vllm::wire::{CompatibilityFactors, explain};
/// let here = CompatibilityFactors::new(Version::V0_33, "m");
/// let mut there = here.clone();
/// there.dtype = "torch.float16".to_owned();
/// let found = explain(&here, &there.hash()?)?.unwrap();
/// assert_eq!((found.len(), found[0].factor, &*found[0].there), (1, "dtype", "\"torch.float16\""));
/// # Ok::<(), kvx_core::Error>(())
/// ```
pub fn explain(
    here: &CompatibilityFactors,
    there: &CompatibilityHash,
) -> Result<Option<Vec<Difference>>> {
    let ours = written(here)?;
    let candidates = candidates(here)?;
    let mut tried = ours.clone();
    let found = |tried: &BTreeMap<String, String>| hashed(tried) == there.as_str();
    if let Some(one) = explain_by_one(here, there)? {
        return Ok(Some(vec![one]));
    }
    for (index, one) in candidates.iter().enumerate() {
        put(&mut tried, one);
        for other in candidates[index + 1..].iter().filter(|other| other.factor != one.factor) {
            // A version that does not hash a factor cannot differ in it.
            if other.sets.iter().all(|(key, _)| tried.contains_key(*key)) {
                put(&mut tried, other);
                if found(&tried) {
                    return Ok(Some(differences(&ours, &[one, other])));
                }
                let before = other.sets.iter().map(|(key, _)| *key);
                for key in before {
                    match one
                        .sets
                        .iter()
                        .find(|(set, _)| *set == key)
                        .map(|(_, value)| value.clone())
                    {
                        Some(value) => set(&mut tried, key, value),
                        None => set(&mut tried, key, ours.get(key).cloned()),
                    }
                }
            }
        }
        take_back(&mut tried, one, &ours);
    }
    Ok(None)
}

/// Tries only one factor, which takes a few milliseconds where [`explain`] may take a second. Also
/// tries vLLM releases that are not known yet, assuming that they hash the same factors as the
/// newest known release.
///
/// # Errors
///
/// As [`explain`].
pub fn explain_by_one(
    here: &CompatibilityFactors,
    there: &CompatibilityHash,
) -> Result<Option<Difference>> {
    let ours = written(here)?;
    let candidates =
        candidates(here)?.into_iter().chain(unknown_versions(here)?).collect::<Vec<_>>();
    let one = alone(&ours, &candidates, there);
    Ok(one.and_then(|one| differences(&ours, &[one]).pop()))
}

/// Returns the candidate with which the local factors have the peer's hash.
fn alone<'a>(
    ours: &BTreeMap<String, String>,
    candidates: &'a [Candidate],
    there: &CompatibilityHash,
) -> Option<&'a Candidate> {
    let mut tried = ours.clone();
    candidates.iter().find(|one| {
        put(&mut tried, one);
        let found = hashed(&tried) == there.as_str();
        take_back(&mut tried, one, ours);
        found
    })
}

fn differences(ours: &BTreeMap<String, String>, those: &[&Candidate]) -> Vec<Difference> {
    let difference = |one: &&Candidate| {
        let absent = || "absent".to_owned();
        let of = |key: &str| ours.get(key).cloned().unwrap_or_else(absent);
        let there = one
            .sets
            .iter()
            .find(|(key, _)| *key == one.factor)
            .and_then(|(_, value)| value.clone());
        Difference { factor: one.factor, here: of(one.factor), there: there.unwrap_or_else(absent) }
    };
    those.iter().map(difference).collect()
}

/// Returns the value of each factor as it is hashed.
fn written(factors: &CompatibilityFactors) -> Result<BTreeMap<String, String>> {
    factors.json()?; // fails if any factor has a fraction
    let text = |value: &Value| python_json::text(value).unwrap_or_default();
    Ok(factors.map().iter().map(|(key, value)| (key.clone(), text(value))).collect())
}

fn hashed(values: &BTreeMap<String, String>) -> String {
    let mut text = String::with_capacity(512);
    for (key, value) in values {
        text.push_str(if text.is_empty() { "{\"" } else { ", \"" });
        text.push_str(key);
        text.push_str("\": ");
        text.push_str(value);
    }
    text.push('}');
    super::compatibility::hex_digest(&Sha256::digest(text))
}

fn set(values: &mut BTreeMap<String, String>, key: &str, value: Option<String>) {
    match value {
        Some(value) => values.insert(key.to_owned(), value),
        None => values.remove(key),
    };
}

fn put(values: &mut BTreeMap<String, String>, candidate: &Candidate) {
    for (key, value) in &candidate.sets {
        set(values, key, value.clone());
    }
}

fn take_back(
    values: &mut BTreeMap<String, String>,
    candidate: &Candidate,
    ours: &BTreeMap<String, String>,
) {
    for (key, _) in &candidate.sets {
        set(values, key, ours.get(*key).cloned());
    }
}

fn candidates(here: &CompatibilityFactors) -> Result<Vec<Candidate>> {
    let text = |value: Value| python_json::text(&value).ok();
    let mut all = versions(here)?;
    let mut add = |factor: &'static str, value: Value| {
        all.push(Candidate { factor, sets: vec![(factor, text(value))] });
    };
    let model = here.further.get("model").and_then(Value::as_str).unwrap_or(&here.model);
    for name in spellings(model) {
        add("model", name.into());
    }
    DTYPES.iter().for_each(|name| add("dtype", (*name).into()));
    CACHE_DTYPES.iter().for_each(|name| add("cache_dtype", (*name).into()));
    BACKENDS.iter().for_each(|name| add("attn_backend_name", (*name).into()));
    HEADS.iter().for_each(|count| add("num_kv_heads", (*count).into()));
    HEAD_SIZES.iter().for_each(|size| add("head_size", (*size).into()));
    (1..=128).for_each(|count| add("num_hidden_layers", count.into()));
    let known = here.map();
    for factor in ["is_hma_enabled", "cross_layers_blocks"] {
        if known.contains_key(factor) {
            add(factor, true.into());
            add(factor, false.into());
        }
    }
    if known.contains_key("transfer_mode") {
        add("transfer_mode", TransferMode::Pull.as_str().into());
        add("transfer_mode", TransferMode::Push.as_str().into());
        add("speculative_config", json!(null));
    }
    Ok(all)
}

/// Returns the known releases of vLLM and their builds, each with the factors that it hashes.
fn versions(here: &CompatibilityFactors) -> Result<Vec<Candidate>> {
    let mut all = Vec::new();
    for (index, version) in Version::SPOKEN.into_iter().enumerate() {
        let next = Version::SPOKEN.get(index + 1).map_or(minor(version) + 1, |next| minor(*next));
        for minor in minor(version)..next {
            add_version(&mut all, here, version, version.connector_version(), (minor, 0..3))?;
        }
    }
    Ok(all)
}

/// Returns releases that this version of kvx does not know: further patches, and releases after the
/// newest.
fn unknown_versions(here: &CompatibilityFactors) -> Result<Vec<Candidate>> {
    let mut all = Vec::new();
    for version in Version::SPOKEN {
        add_version(&mut all, here, version, version.connector_version(), (minor(version), 3..6))?;
    }
    let Some(newest) = Version::SPOKEN.last().copied() else { return Ok(all) };
    for minor in minor(newest)..=minor(newest) + LATER {
        for further in 0..=LATER {
            add_version(
                &mut all,
                here,
                newest,
                newest.connector_version() + further,
                (minor, 0..6),
            )?;
        }
    }
    Ok(all)
}

/// The number of minor releases, and of connector versions, to try after the newest known ones.
const LATER: u32 = 6;

fn minor(version: Version) -> u32 {
    version.vllm_version().split('.').nth(1).and_then(|minor| minor.parse().ok()).unwrap_or(0)
}

/// Adds all builds of these patches of a minor release.
fn add_version(
    all: &mut Vec<Candidate>,
    here: &CompatibilityFactors,
    version: Version,
    connector_version: u32,
    (minor, patches): (u32, Range<u32>),
) -> Result<()> {
    let mut factors = here.clone();
    // Factors that the operator wrote would override those of the version.
    for key in FACTORS_OF_VERSIONS {
        factors.further.remove(key);
    }
    (factors.version, factors.connector_version) = (version, connector_version);
    for (patch, build) in patches.flat_map(|patch| BUILDS.iter().map(move |build| (patch, build))) {
        factors.vllm_version = format!("0.{minor}.{patch}{build}");
        let values = written(&factors)?;
        let sets = FACTORS_OF_VERSIONS.map(|key| (key, values.get(key).cloned())).to_vec();
        all.push(Candidate { factor: "vllm_version", sets });
    }
    Ok(())
}

/// The factors whose presence or value depends on the version.
const FACTORS_OF_VERSIONS: [&str; 6] = [
    "vllm_version",
    "nixl_connector_version",
    "cross_layers_blocks",
    "is_hma_enabled",
    "speculative_config",
    "transfer_mode",
];

/// Returns other forms in which the same model may have been given to `vllm serve`.
fn spellings(model: &str) -> Vec<String> {
    let bare = model.trim_end_matches('/');
    let parts: Vec<&str> = bare.rsplit('/').collect();
    let mut all =
        vec![bare.to_owned(), format!("{bare}/"), format!("./{bare}"), bare.to_lowercase()];
    all.push(bare.trim_start_matches("./").to_owned());
    if let [name, parent, ..] = parts[..] {
        all.extend([name.to_owned(), format!("./{name}"), format!("{parent}/{name}")]);
    }
    all.sort();
    all.dedup();
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn here() -> CompatibilityFactors {
        let mut factors = CompatibilityFactors::new(Version::V0_33, "models/Qwen3-0.6B");
        (factors.num_kv_heads, factors.head_size, factors.num_hidden_layers) = (8, 128, 28);
        factors
    }

    fn found(there: &CompatibilityFactors) -> Option<Vec<&'static str>> {
        let found = explain(&here(), &there.hash().unwrap()).unwrap()?;
        Some(found.iter().map(|difference| difference.factor).collect())
    }

    #[test]
    fn the_text_that_is_hashed_is_the_same() {
        assert_eq!(hashed(&written(&here()).unwrap()), here().hash().unwrap().as_str());
    }

    #[test]
    fn one_or_two_known_differences_are_found_and_three_are_not() {
        let mut there = here();
        there.vllm_version = "0.33.1+cu129".to_owned();
        assert_eq!(found(&there), Some(vec!["vllm_version"]));
        there.model = "Qwen3-0.6B".to_owned();
        assert_eq!(found(&there), Some(vec!["vllm_version", "model"]));
        there.dtype = "torch.float16".to_owned();
        assert_eq!(found(&there), None);
    }

    #[test]
    fn a_release_that_is_not_known_yet_is_named() {
        for (version, connector) in [("0.33.4+cpu", 15), ("0.34.0", 15), ("0.36.2+cu130", 18)] {
            let there = CompatibilityFactors {
                vllm_version: version.to_owned(),
                connector_version: connector,
                ..here()
            };
            let found = explain_by_one(&here(), &there.hash().unwrap()).unwrap().unwrap();
            assert_eq!((found.factor, &*found.there), ("vllm_version", &*format!("\"{version}\"")));
        }
    }

    #[test]
    fn another_release_brings_its_own_factors() {
        for version in Version::SPOKEN.into_iter().filter(|version| *version != Version::V0_33) {
            let there = CompatibilityFactors {
                version,
                vllm_version: version.vllm_version().to_owned(),
                connector_version: version.connector_version(),
                ..here()
            };
            assert_eq!(found(&there), Some(vec!["vllm_version"]), "{version}");
        }
    }
}
