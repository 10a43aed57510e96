//! Regions: memory registered with an agent, and the regions of its peers.

use crate::grid::{Grid, GridSet};
use crate::identity::Identity;
use crate::{MemoryKind, RegionId, RegionKey, Result};

/// Something that grids can lie on.
pub trait Place {
    #[doc(hidden)] fn len(&self) -> u64;
    #[doc(hidden)] fn kind(&self) -> MemoryKind;
    #[doc(hidden)] fn origin(&self) -> (u64, u64);
    #[doc(hidden)] fn is(&self, other: &Self) -> bool;
}
/// draft
#[derive(Clone)]
pub struct Region;
/// draft
#[derive(Clone)]
pub struct PeerRegion;
impl Place for Region { fn len(&self)->u64{0} fn kind(&self)->MemoryKind{MemoryKind::Host} fn origin(&self)->(u64,u64){(0,0)} fn is(&self,_:&Self)->bool{true} }
impl Place for PeerRegion { fn len(&self)->u64{0} fn kind(&self)->MemoryKind{MemoryKind::Host} fn origin(&self)->(u64,u64){(0,0)} fn is(&self,_:&Self)->bool{true} }
impl Region { pub(crate) fn same_agent(&self,_:&Self)->bool{true} 
/// g
pub fn grid(&self,g:Grid)->Result<GridSet<Region>>{GridSet::one(self.clone(),g)} }
impl PeerRegion { pub(crate) fn peer(&self)->&Identity{todo!()} }
#[allow(dead_code)] fn x(_:RegionId,_:RegionKey){}
