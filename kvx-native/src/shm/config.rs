//! The options table `shm`.

use kvx_core::{Options, Result};

/// The options that an operator may set.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Config {
    /// True if memory outside of kvx pools is moved too, by `process_vm_readv`.
    pub(crate) foreign_memory: bool,
}

impl Config {
    /// Reads the table. Returns `Invalid` for an unknown key or a value of the wrong type.
    pub(crate) fn read(options: &Options) -> Result<Self> {
        let table = options.table("shm", &["foreign_memory"])?;
        Ok(Config { foreign_memory: table.flag("foreign_memory")?.unwrap_or(true) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_memory_is_on_by_default() {
        assert!(Config::read(&Options::new()).unwrap().foreign_memory);
        let off = Options::parse(r#"{"shm": {"foreign_memory": false}}"#).unwrap();
        assert!(!Config::read(&off).unwrap().foreign_memory);
        assert!(Config::read(&Options::parse(r#"{"shm": {"pools": 1}}"#).unwrap()).is_err());
    }
}
