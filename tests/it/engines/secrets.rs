//! Tests engines with the fleet's secret, with another one, and without.

use std::path::PathBuf;

use kvx_testkit::{Check, Failure, Tier};

use crate::engines::Case;
use crate::engines::fleet::{CUT_OFF, Engine, Load, MOONCAKE, ensure, spec};

pub(crate) fn cases() -> Vec<Case> {
    let run = |backend: &str| strangers(&format!("{MOONCAKE}{backend}"));
    vec![Case::new(
        "an_engine_without_the_secret_is_rejected_in_both_roles",
        "TCP",
        Tier::Usual,
        run,
    )]
}

/// Creates a secret file for this test.
fn secret(name: &str) -> Result<PathBuf, Failure> {
    let file = std::env::temp_dir().join(format!("kvx-{}-{name}.secret", std::process::id()));
    std::fs::remove_file(&file).ok();
    kvx::Secret::create(&file).map_err(|error| Failure::new(error.to_string()))?;
    Ok(file)
}

fn strangers(backend: &str) -> Check {
    let (ours, other) = (secret("ours")?, secret("other")?);
    let start = |name: &str, secret: Option<&PathBuf>| {
        let mut spec = spec(name, backend);
        let secret = secret.map(|file| ("KVX_SECRET_FILE".to_owned(), file.display().to_string()));
        spec.variables.extend(secret);
        Engine::start(spec)
    };
    let mut prefill = start("prefill", Some(&ours))?;
    let mut open = start("open", None)?;
    let mut decode = start("decode", Some(&ours))?;
    let loads = |prefill: &mut Engine, decode: &mut Engine, request: &str| {
        let params = prefill.prefill(request, 7, 33)?;
        decode.decode(&Load::new(request, 7, 33), &params, CUT_OFF)
    };
    loads(&mut prefill, &mut decode, "friend")?;
    decode.arrives("friend", 33)?;
    for (name, secret, word) in
        [("none", None, "decode has none"), ("another", Some(&other), "secrets of this decode")]
    {
        let mut stranger = start(name, secret)?;
        loads(&mut prefill, &mut stranger, name)?;
        let why = stranger.fails(name, CUT_OFF)?;
        ensure(why.contains(word) && why.contains("KVX_SECRET_FILE"), || format!("{name}: {why}"))?;
        prefill.abort(name)?;
        stranger.all_free(CUT_OFF)?;
    }
    // The decode rejects a prefill without the secret.
    loads(&mut open, &mut decode, "believed")?;
    let why = decode.fails("believed", CUT_OFF)?;
    ensure(why.contains("KVX_SECRET_FILE"), || why)?;
    open.abort("believed")?;
    loads(&mut prefill, &mut decode, "again")?;
    decode.arrives("again", 33)?;
    for engine in [&mut prefill, &mut open, &mut decode] {
        engine.all_free(CUT_OFF)?;
    }
    for file in [ours, other] {
        std::fs::remove_file(file)?;
    }
    Ok(())
}
