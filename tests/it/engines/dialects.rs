//! Tests engines of different versions, and the settings that concern them.

use std::time::Duration;

use kvx_testkit::{Check, Failure, Tier};
use serde_json::json;

use crate::engines::Case;
use crate::engines::engine::Spec;
use crate::engines::fleet::{CUT_OFF, Engine, GRACE, Load, spec};

/// Versions as `kv_compat` names them; each covers all versions up to the next.
const VERSIONS: [&str; 11] =
    ["0.16", "0.20", "0.21", "0.22", "0.26", "0.28", "0.29", "0.30", "0.31", "0.32", "0.33"];
const DEADLINE: Duration = Duration::from_secs(3);

pub(crate) fn cases() -> Vec<Case> {
    vec![
        Case::new("neighbouring_dialects_do_not_meet", "TCP", Tier::Usual, some),
        // vLLM 2: versions with different protocols reject each other with an error that names both
        Case::new("equal_dialects_meet_and_no_others", "TCP", Tier::Whole, all),
        Case::new("the_check_of_dialects_can_be_switched_off", "TCP", Tier::Usual, unchecked),
        Case::new("the_abort_variable_holds_on_either_side", "TCP", Tier::Usual, abort_variable),
    ]
}

fn of(version: &str, name: &str, backend: &str, check: bool) -> Result<Engine, Failure> {
    let mut spec = spec(&format!("{name}-{version}"), backend);
    spec.extra = json!({ "kv_compat": version, "enforce_handshake_compat": check });
    Engine::start(spec)
}

fn some(backend: &str) -> Check {
    meet(backend, &["0.20", "0.29", "0.33"])
}

fn all(backend: &str) -> Check {
    meet(backend, &VERSIONS)
}

fn meet(backend: &str, versions: &[&str]) -> Check {
    let engines = |name: &str| -> Result<Vec<Engine>, Failure> {
        versions.iter().map(|version| of(version, name, backend, true)).collect()
    };
    let (mut prefills, mut decodes) = (engines("prefill")?, engines("decode")?);
    for (prefill, theirs) in prefills.iter_mut().zip(versions) {
        for (decode, ours) in decodes.iter_mut().zip(versions) {
            let request = format!("{theirs}-{ours}");
            let params = prefill.prefill(&request, 5, 17)?;
            decode.decode(&Load::new(&request, 5, 17), &params, DEADLINE)?;
            if ours == theirs {
                decode.arrives(&request, 17)?;
                continue;
            }
            let why = decode.fails(&request, DEADLINE)?;
            let named = [ours, theirs].iter().all(|version| why.contains(*version));
            crate::engines::fleet::ensure(named, || {
                format!("{ours} from {theirs}: the error must name both versions: {why}")
            })?;
            prefill.abort(&request)?;
        }
    }
    for engine in prefills.iter_mut().chain(&mut decodes) {
        engine.all_free(CUT_OFF)?;
    }
    Ok(())
}

fn unchecked(backend: &str) -> Check {
    let (mut prefill, mut decode) =
        (of("0.31", "prefill", backend, false)?, of("0.33", "decode", backend, false)?);
    let params = prefill.prefill("request", 5, 49)?;
    decode.loads(&Load::new("request", 5, 49), &params)?;
    prefill.all_free(CUT_OFF)
}

fn abort_variable(backend: &str) -> Check {
    let variable = vec![("VLLM_NIXL_ABORT_REQUEST_TIMEOUT".to_owned(), "2".to_owned())];
    let with =
        |name: &str| Engine::start(Spec { variables: variable.clone(), ..spec(name, backend) });
    // On the prefill's side, the blocks are free after that time in any case.
    let (mut prefill, mut decode) = (with("prefill")?, Engine::start(spec("decode", backend))?);
    prefill.prefill("nobody's", 5, 17)?;
    prefill.all_free(Duration::from_secs(2) + 2 * GRACE)?;
    let params = prefill.prefill("request", 6, 49)?;
    decode.loads(&Load::new("request", 6, 49), &params)?;
    prefill.all_free(GRACE)?;
    // On the decode's side, the variable has no effect on a prefill that leases.
    let (mut prefill, mut decode) = (Engine::start(spec("leases", backend))?, with("asks")?);
    let params = prefill.prefill("request", 7, 49)?;
    decode.loads(&Load::new("request", 7, 49), &params)?;
    prefill.all_free(CUT_OFF)
}
