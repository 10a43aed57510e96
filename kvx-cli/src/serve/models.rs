//! Finds a model's folder.

use std::path::{Path, PathBuf};

use crate::Result;

/// Returns the folder of a model: the named folder, or the newest snapshot of that name in the
/// local Hugging Face cache.
pub(super) fn find(model: &str) -> Result<PathBuf> {
    if Path::new(model).is_dir() {
        return Ok(model.into());
    }
    let cache =
        cache(|name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from));
    find_in(model, cache.as_deref())
}

fn find_in(model: &str, cache: Option<&Path>) -> Result<PathBuf> {
    let found = cache.and_then(|cache| {
        let kept = cache.join(format!("models--{}", model.replace('/', "--")));
        let revision = std::fs::read_to_string(kept.join("refs/main")).ok()?;
        Some(kept.join("snapshots").join(revision.trim())).filter(|snapshot| snapshot.is_dir())
    });
    found.ok_or_else(|| {
        let looked = cache.map_or("no Hugging Face cache".to_owned(), |cache| cache.display().to_string());
        format!(
            "{model} is not a folder, and {looked} does not have it; fetch it with `hf download {model}` (kvx downloads \
             nothing), name a model's folder, or create one with random weights by `kvx make-model FOLDER`"
        )
        .into()
    })
}

/// Returns the cache folder, found as Hugging Face's own tools do.
fn cache(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let hub = variable("HF_HUB_CACHE").or_else(|| variable("HUGGINGFACE_HUB_CACHE"));
    hub.or_else(|| Some(variable("HF_HOME")?.join("hub")))
        .or_else(|| Some(variable("XDG_CACHE_HOME")?.join("huggingface/hub")))
        .or_else(|| Some(variable("HOME")?.join(".cache/huggingface/hub")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_looked_for_where_huggingface_keeps_it() {
        let root = std::env::temp_dir().join(format!("kvx-serve-models-{}", std::process::id()));
        let kept = root.join("models--Qwen--Qwen3-0.6B");
        std::fs::create_dir_all(kept.join("snapshots/abc")).unwrap();
        std::fs::create_dir_all(kept.join("refs")).unwrap();
        std::fs::write(kept.join("refs/main"), "abc\n").unwrap();
        let found = find_in("Qwen/Qwen3-0.6B", Some(&root));
        let other = find_in("Qwen/Qwen3-8B", Some(&root));
        std::fs::remove_dir_all(&root).unwrap();
        assert_eq!(found.unwrap(), kept.join("snapshots/abc"));
        let error = other.unwrap_err().to_string();
        assert!(
            error.contains("hf download Qwen/Qwen3-8B") && error.contains("kvx make-model"),
            "{error}"
        );
    }

    #[test]
    fn variables_say_where_the_cache_is() {
        let of = |set: &[(&str, &str)]| {
            cache(|name| {
                set.iter().find(|(known, _)| *known == name).map(|(_, value)| PathBuf::from(value))
            })
        };
        assert_eq!(
            of(&[("HOME", "/h"), ("HF_HOME", "/f"), ("HF_HUB_CACHE", "/c")]),
            Some("/c".into())
        );
        assert_eq!(of(&[("HOME", "/h"), ("HF_HOME", "/f")]), Some("/f/hub".into()));
        assert_eq!(of(&[("HOME", "/h")]), Some("/h/.cache/huggingface/hub".into()));
        assert_eq!(of(&[]), None);
    }
}
