//! The native libraries of backends, and whether their versions go together.

use kvx::{BackendStatus, Options, Registry};

use super::super::finding::Finding;
use crate::wheels::{self, Environments};

pub(super) fn examine(registry: &Registry) -> Vec<Finding> {
    let environments = Environments::of_process();
    let libraries = wheels::find(&environments);
    let mut found: Vec<_> = registry
        .names()
        .into_iter()
        .filter_map(|name| backend(name, registry, &libraries))
        .collect();
    found.extend(wheels::nixls(&environments).iter().map(|library| {
        let verdict = plugin_KVX::installation::verdict(library);
        nixl(&library.display().to_string(), verdict.as_deref().map_err(ToString::to_string))
    }));
    #[cfg(any(feature = "cuda", feature = "rocm"))]
    found.extend(gpus());
    found
}

fn backend(
    name: &'static str,
    registry: &Registry,
    libraries: &[wheels::FoundLibrary],
) -> Option<Finding> {
    let topic = "backend";
    Some(match registry.status(name, &Options::new()).ok()?.1 {
        BackendStatus::Available(found) => {
            let what = format!("{name} {}", found.version);
            match found.cautions.is_empty() {
                true => Finding::ok(topic, what),
                false => Finding::note(topic, what).because(found.cautions.join("; ")),
            }
        }
        BackendStatus::Unavailable(why) => {
            let elsewhere = libraries.iter().find(|library| library.backend == name);
            let cure = match elsewhere {
                Some(library) if library.variable != wheels::MOONCAKE_ENGINE => {
                    format!("`export {}={}`", library.variable, library.path.display())
                }
                _ => why.cure.clone(),
            };
            Finding::note(topic, format!("{name} does not work: {}", why.reason()))
                .because("needed only if `backends` names it, or for peers that have nothing else")
                .cure(cure)
        }
        BackendStatus::NotCompiled { .. } | BackendStatus::NotReleased => return None,
    })
}

/// Judges a NIXL that is installed here.
fn nixl(library: &str, verdict: Result<&str, String>) -> Finding {
    match verdict {
        Ok(name) => Finding::ok("NIXL", format!("{name} at {library}")),
        Err(why) => Finding::warning("NIXL", why)
            .because(format!(
                "the NIXL at {library} does not take kvx's backend KVX; its own backends work \
                     without it"
            ))
            .cure("install a NIXL that `kvx nixl` supports, or keep UCX in `backends`"),
    }
}

/// Reports a GPU's driver that is there and does not work.
#[cfg(any(feature = "cuda", feature = "rocm"))]
fn gpus() -> Option<Finding> {
    let has = |node: &str| std::path::Path::new(node).exists();
    if !has("/dev/nvidiactl") && !has("/dev/kfd") {
        return Some(Finding::ok("GPU", "none"));
    }
    Some(match crate::devices::all() {
        Ok(devices) => {
            let names: Vec<_> = devices
                .iter()
                .map(|device| {
                    let info = device.info();
                    format!("{} {} ({} {})", info.kind, info.name, info.driver, info.version)
                })
                .collect();
            Finding::ok("GPU", names.join("; "))
        }
        Err(why) => Finding::problem("GPU", why.to_string())
            .because(
                "a driver is loaded, and its library or its devices cannot be used: device \
                 memory cannot be moved",
            )
            .cure(
                "`nvidia-smi` or `rocm-smi` in the same container says more; give the \
                 container its GPUs (`--gpus all`, or `--device /dev/kfd --device /dev/dri`)",
            ),
    })
}

#[cfg(test)]
mod tests {
    use super::super::super::finding::Level;
    use super::*;

    #[test]
    fn a_nixl_that_was_not_tried_is_a_warning() {
        assert_eq!(nixl("/a", Ok("NIXL 1.4.1")).level, Level::Ok);
        let refused = nixl("/a/libnixl.so", Err("NIXL 0.2.0 was not tried".to_owned()));
        assert_eq!((refused.level, &*refused.what), (Level::Warning, "NIXL 0.2.0 was not tried"));
        assert!(refused.why.unwrap().contains("/a/libnixl.so"));
    }

    #[test]
    fn every_backend_of_this_build_has_a_line() {
        let found = examine(&kvx::registry());
        let lines: Vec<_> = found.iter().filter(|finding| finding.topic == "backend").collect();
        for name in ["SHM", "TCP"] {
            let line = lines.iter().find(|line| line.what.starts_with(name)).unwrap();
            assert_eq!(line.level, Level::Ok, "{line:?}");
        }
    }
}
