//! Binds a plan to a link: looks up its regions as the link's transport knows them.

use std::sync::{Arc, Weak};

use super::candidates::Imported;
use super::links::PeerInner;
use crate::bound::{BoundPlan, KeepsBound, LocalSide, RemoteSide};
use crate::grid::Place;
use crate::identity::LinkId;
use crate::plan::Plan;
use crate::region::{PeerRegion, What};
use crate::transport::{Link, RemoteRegion, RemoteSpec};
use crate::{ErrorKind, Result};

impl PeerInner {
    /// Returns the plan bound to this link, from the last time or made now.
    pub(super) fn bind(
        &self,
        plan: &Plan,
        at: usize,
        id: LinkId,
        link: &Arc<dyn Link>,
    ) -> Result<Arc<BoundPlan>> {
        if let Some((on, bound)) = &*plan.0.bound.lock()
            && *on == id
        {
            return Ok(Arc::clone(bound));
        }
        let capabilities = link.capabilities();
        for (side, kinds, kind) in [
            ("local", capabilities.local, plan.0.locals.first().map(Place::kind)),
            ("remote", capabilities.remote, plan.0.remotes.first().map(Place::kind)),
        ] {
            if let Some(kind) = kind.filter(|kind| !kinds.contains(*kind)) {
                return Err(ErrorKind::Unsupported
                    .because(format!("it does not reach {side} {kind} memory")));
            }
        }
        let transport = self.state.lock().candidates[at].transport;
        let locals = plan
            .0
            .locals
            .iter()
            .map(|region| {
                let core = region.core();
                let native = core.locals[transport].clone()?;
                Ok(LocalSide {
                    id: core.id,
                    key: core.key,
                    memory: Arc::clone(&core.memory),
                    region: native,
                })
            })
            .collect::<Result<Vec<_>>>()?;
        let remotes = plan
            .0
            .remotes
            .iter()
            .map(|region| {
                let len = Place::len(region);
                Ok(RemoteSide {
                    id: region.id(),
                    key: region.key(),
                    len,
                    region: self.import(region, at, link)?,
                })
            })
            .collect::<Result<Vec<_>>>()?;
        let (op, size, pairs) = (plan.op(), plan.size(), Arc::clone(&plan.0.pairs));
        let bound = Arc::new(BoundPlan::new(op, size, pairs, id, locals, remotes));
        *plan.0.bound.lock() = Some((id, Arc::clone(&bound)));
        let keeps = || Arc::downgrade(&plan.0) as Weak<dyn KeepsBound>;
        self.state.lock().candidates[at].bindings.add(keeps());
        plan.0.locals.iter().for_each(|region| region.core().bound(keeps()));
        Ok(bound)
    }

    fn import(
        &self,
        region: &PeerRegion,
        at: usize,
        link: &Arc<dyn Link>,
    ) -> Result<Arc<dyn RemoteRegion>> {
        let info = match region.what() {
            What::Foreign(range) => return link.import_foreign(*range),
            What::Named(info) => info,
        };
        let position = {
            let state = self.state.lock();
            let candidate = &state.candidates[at];
            if let Some(known) = candidate.imports.get(&info.id) {
                // Compares the length too: a backend has mapped as much as the metadata named then.
                if known.len == info.len && known.key.matches(&info.key) {
                    return Ok(Arc::clone(&known.region));
                }
                return Err(ErrorKind::Malformed.because(format!(
                    "the peer's metadata contradicts itself about region {}: connect again",
                    info.name
                )));
            }
            state.about.metadata()?.backend(candidate.backend).map(|(position, _)| position)
        };
        let export = position.and_then(|position| info.export(position)).ok_or_else(|| {
            ErrorKind::Unsupported
                .because(format!("the peer's region {} is not registered with it", info.name))
        })?;
        let spec =
            RemoteSpec { id: info.id, key: info.key, len: info.len, kind: info.kind, export };
        let imported = link.import(spec)?;
        let mut state = self.state.lock();
        let imported = Imported { key: info.key, len: info.len, region: imported };
        Ok(Arc::clone(&state.candidates[at].imports.entry(info.id).or_insert(imported).region))
    }
}
