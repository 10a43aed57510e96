//! An agent's NIXL address: RIXL's section of the metadata.

use kvx_backend::checksum;
use kvx_core::backend::MAX_NAME;
use kvx_core::backend::wire::{Reader, Writer};
use kvx_core::{Identity, Result};

use crate::blob::Blob;
use crate::error::NAME;
use crate::memory::Export;

/// Returns the name under which NIXL knows a kvx agent: each incarnation has its own.
pub(crate) fn name_of(agent: &Identity) -> String {
    format!("{}@{}", agent.name, agent.incarnation)
}

/// The address of an agent, as its metadata contains it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) name: String,
    /// NIXL's own metadata: a blob without memory.
    pub(crate) blob: Vec<u8>,
    /// A page that peers read and write in their trials.
    pub(crate) page: Export,
}

/// The maximum length of the blob: some hundred bytes for each network device.
const MAX_CONNECTION: usize = 256 << 10;

impl Address {
    const FORM: u8 = 1;

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = vec![Self::FORM];
        out.put_block(self.name.as_bytes());
        out.put_block(&self.blob);
        out.put_block(&self.page.encode());
        checksum::append(out)
    }

    /// Decodes an address. Errors: `Malformed`, `Incompatible`.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new("RIXL address", checksum::strip("RIXL address", bytes)?);
        checksum::check_form(NAME, "address", reader.u8()?, Self::FORM)?;
        let name = std::str::from_utf8(reader.block(MAX_NAME + 33)?)
            .map_err(|_| reader.malformed("no name"))?;
        let blob = reader.block(MAX_CONNECTION)?.to_vec();
        let page = Export::decode(reader.block(MAX_CONNECTION)?)?;
        reader.end()?;
        let said = Blob::read(&blob)?;
        if said.agent != name || said.connections.is_empty() || !said.memory.is_empty() {
            return Err(reader.malformed("its parts contradict each other"));
        }
        page.check(name)?;
        Ok(Address { name: name.to_owned(), blob, page })
    }
}
