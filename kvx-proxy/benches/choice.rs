//! The cost of a choice among 256 instances: a prefill instance, and a decode instance that pairs
//! with it.
//!
//! `cargo bench -p kvx-proxy --bench choice -- --bars` prints one JSON object per line.

use std::hint::black_box;
use std::time::Instant;

use kvx_proxy::{Choice, Setup, bench::HealthyFleet};

const CHOICES: u32 = 20_000;
const ROUNDS: usize = 9;

fn main() -> Result<(), kvx_proxy::Error> {
    for (name, choice) in [
        ("least-tokens", Choice::LeastTokens),
        ("round-robin", Choice::RoundRobin),
        ("prefix", Choice::Prefix),
    ] {
        let urls = |from: u32| {
            let urls = (from..from + 128).map(|port| format!("'http://127.0.0.1:{port}'"));
            urls.collect::<Vec<_>>().join(", ")
        };
        let text = format!("[[pool]]\nprefill = [{}]\ndecode = [{}]\n", urls(10_000), urls(20_000));
        let mut setup = Setup::from_toml(&text)?;
        setup.choice = choice;
        let fleet = HealthyFleet::new(&setup);
        let mut rounds: Vec<_> = (0..ROUNDS)
            .map(|_| {
                let start = Instant::now();
                for count in 0..CHOICES {
                    let prefix = u64::from(count.wrapping_mul(0x9e37_79b1));
                    assert!(black_box(fleet.choose_pair(u64::from(count % 4096), prefix)));
                }
                start.elapsed().as_secs_f64() * 1e6 / f64::from(CHOICES)
            })
            .collect();
        rounds.sort_unstable_by(f64::total_cmp);
        println!(
            "{{\"cost\":\"choice_us\",\"choice\":\"{name}\",\"value\":{:.3}}}",
            rounds[ROUNDS / 2]
        );
    }
    Ok(())
}
