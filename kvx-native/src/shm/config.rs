//! The options table `shm`.

use kvx_core::{Options, Result};

/// What an operator may set.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Config {
    /// Whether memory that is no kvx pool is moved too, by `process_vm_readv`.
    pub(crate) foreign_memory: bool,
}

impl Config {
    /// Reads the table. Errors: `Invalid` for a key that is not an option or a value of the wrong
    /// type.
    pub(crate) fn read(options: &Options) -> Result<Self> {
        let table = options.table("shm", &["foreign_memory"])?;
        Ok(Config { foreign_memory: table.flag("foreign_memory")?.unwrap_or(true) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_memory_is_on_unless_told() {
        assert!(Config::read(&Options::new()).unwrap().foreign_memory);
        let off = Options::parse(r#"{"shm": {"foreign_memory": false}}"#).unwrap();
        assert!(!Config::read(&off).unwrap().foreign_memory);
        assert!(Config::read(&Options::parse(r#"{"shm": {"pools": 1}}"#).unwrap()).is_err());
    }
}
