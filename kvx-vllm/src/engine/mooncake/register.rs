//! The register of a bootstrap server: the addresses of prefill workers, and how long they are
//! valid.

use std::collections::BTreeMap;
use std::time::Duration;

use kvx_core::{ErrorKind, Result};

use crate::ids::WorkerRank;
use crate::time::Time;
use crate::wire::mooncake::{Directory, WorkerRegistration};

/// The maximum time for which a registration is valid.
const MAX_TTL: Duration = Duration::from_secs(3600);

#[derive(Debug)]
struct RegisteredWorker {
    engine_id: String,
    addr: String,
    /// The time at which the worker counts as dead unless it registers again. A vLLM worker sends
    /// none.
    until: Option<Time>,
}

/// The register of one bootstrap server, without its socket.
///
/// A worker may register any number of times with the same address. While it is alive, the register
/// rejects another address or another engine in its place. A kvx worker is dead if it does not
/// register again within its `kvx_ttl`. A vLLM worker never is.
#[derive(Debug, Default)]
pub struct BootstrapRegister {
    workers: BTreeMap<(u32, WorkerRank), RegisteredWorker>,
}

impl BootstrapRegister {
    /// Registers the address of a worker.
    ///
    /// # Errors
    ///
    /// `Invalid` if its place is taken, `Busy` if there are too many workers. vLLM's server answers
    /// status 400 with the message.
    pub fn register(&mut self, now: Time, registration: WorkerRegistration) -> Result<()> {
        self.forget_dead(now);
        let WorkerRegistration { engine_id, dp_rank, rank, addr, kvx_ttl } = registration;
        let same_rank = |(dp, _): &(&(u32, WorkerRank), &RegisteredWorker)| dp.0 == dp_rank;
        let other = self.workers.iter().filter(same_rank).find(|((_, place), known)| {
            known.engine_id != engine_id || (*place == rank && known.addr != addr)
        });
        if let Some(((_, place), known)) = other {
            let cure = match known.until {
                Some(until) => format!(
                    "it expires in {:.0} s unless it registers again",
                    until.since(now).as_secs_f64()
                ),
                None => {
                    "it is a vLLM worker and never expires: restart this bootstrap server".into()
                }
            };
            return Err(ErrorKind::Invalid.because(format!(
                "data-parallel rank {dp_rank} belongs to engine {}, whose worker (tensor rank {}, \
                 pipeline rank {}) listens at {}; {cure}",
                known.engine_id, place.tp, place.pp, known.addr
            )));
        }
        let key = (dp_rank, rank);
        if self.workers.len() >= Directory::MAX_WORKERS && !self.workers.contains_key(&key) {
            return Err(ErrorKind::Busy.because(format!(
                "{} workers are already registered; that is the limit",
                self.workers.len()
            )));
        }
        let until = kvx_ttl.map(|ttl| now + Duration::from_secs(ttl.into()).min(MAX_TTL));
        self.workers.insert(key, RegisteredWorker { engine_id, addr, until });
        Ok(())
    }

    /// Returns the directory for a decode's query.
    pub fn directory(&mut self, now: Time) -> Directory {
        self.forget_dead(now);
        let mut directory = Directory::default();
        for ((dp, rank), worker) in &self.workers {
            let engine = directory.engines.entry(*dp).or_default();
            engine.engine_id.clone_from(&worker.engine_id);
            engine.is_kvx = worker.until.is_some();
            engine.workers.insert(*rank, worker.addr.clone());
        }
        directory
    }

    /// Removes a worker of an engine.
    pub fn forget(&mut self, engine_id: &str, dp_rank: u32, rank: WorkerRank) {
        let key = (dp_rank, rank);
        if self.workers.get(&key).is_some_and(|worker| worker.engine_id == engine_id) {
            self.workers.remove(&key);
        }
    }

    fn forget_dead(&mut self, now: Time) {
        self.workers.retain(|_, worker| worker.until.is_none_or(|until| !now.has_reached(until)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Time {
        Time::from_origin(Duration::from_secs(seconds))
    }

    fn worker(
        engine: &str,
        dp_rank: u32,
        tp: u32,
        port: u32,
        kvx_ttl: Option<u32>,
    ) -> WorkerRegistration {
        let (engine_id, addr) = (engine.to_owned(), format!("tcp://h:{port}"));
        WorkerRegistration { engine_id, dp_rank, rank: WorkerRank { pp: 0, tp }, addr, kvx_ttl }
    }

    // vLLM 56: an equal repeated registration is accepted, a different one is an error, and dead
    //     workers are forgotten
    #[test]
    fn a_worker_registers_again_and_no_other_takes_its_place() {
        let mut register = BootstrapRegister::default();
        for tp in 0..2 {
            register.register(at(0), worker("e", 0, tp, 10 + tp, None)).unwrap();
            register.register(at(1), worker("e", 0, tp, 10 + tp, None)).unwrap();
        }
        register.register(at(1), worker("f", 1, 0, 20, None)).unwrap();
        for other in
            [worker("e", 0, 0, 99, None), worker("f", 0, 0, 10, None), worker("f", 0, 5, 10, None)]
        {
            let error = register.register(at(2), other).unwrap_err();
            assert!(
                error.kind() == ErrorKind::Invalid && error.to_string().contains("engine e"),
                "{error}"
            );
        }
        let directory = register.directory(at(1_000_000));
        assert_eq!(directory.engine("e").unwrap().sizes(), Ok((2, 1)), "a vLLM never expires");
        assert_eq!(directory.engines[&1].workers.len(), 1);
    }

    #[test]
    fn an_engine_that_stops_registering_frees_its_rank() {
        let mut register = BootstrapRegister::default();
        register.register(at(0), worker("e", 0, 0, 10, Some(30))).unwrap();
        register.register(at(20), worker("e", 0, 0, 10, Some(30))).unwrap();
        let error = register.register(at(45), worker("next", 0, 0, 11, Some(30))).unwrap_err();
        assert!(error.to_string().contains("in 5 s"), "{error}");
        assert!(register.directory(at(49)).engine("e").is_some());
        assert_eq!(register.directory(at(50)), Directory::default());
        register.register(at(50), worker("gone", 0, 0, 11, Some(30))).unwrap();
        register.forget("other", 0, WorkerRank::default());
        assert!(register.directory(at(50)).engine("gone").is_some_and(|engine| engine.is_kvx));
        register.forget("gone", 0, WorkerRank::default());
        register.register(at(50), worker("next", 0, 0, 11, Some(u32::MAX))).unwrap();
        assert!(register.directory(at(3649)).engine("next").is_some());
        assert!(
            register.directory(at(3650)).engine("next").is_none(),
            "the TTL has an upper limit"
        );
    }

    #[test]
    fn workers_are_bounded_and_known_ones_may_register_again() {
        let mut register = BootstrapRegister::default();
        let many = (0..Directory::MAX_WORKERS as u32)
            .map(|number| worker("e", number / 512, number % 512, 1, None));
        for each in many {
            register.register(at(0), each).unwrap();
        }
        assert_eq!(
            register.register(at(0), worker("e", 900, 0, 1, None)).unwrap_err().kind(),
            ErrorKind::Busy
        );
        register.register(at(0), worker("e", 0, 0, 1, None)).unwrap();
    }
}
