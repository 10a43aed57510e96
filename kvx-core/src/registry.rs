//! Which backends there are: the factories that are compiled in, and the table of all known names.

use std::fmt;
use std::sync::Arc;

use crate::fault_injection::injected;
use crate::names::nearest;
use crate::transport::{Availability, Factory, Unavailable};
use crate::{Error, ErrorKind, Options, Result};

/// A name that users may write, whether or not its backend is in this build.
#[derive(Clone, Copy, Debug)]
pub struct BackendName {
    /// The name, in capitals.
    pub name: &'static str,
    /// Other names for it.
    pub aliases: &'static [&'static str],
    /// The facade's feature that compiles it in; `None`: this release does not contain it.
    pub feature: Option<&'static str>,
}

/// The meaning of a name in this build and on this machine.
#[derive(Clone, Debug)]
pub enum BackendStatus {
    /// It can be used.
    Available(Availability),
    /// Compiled in, but not usable on this machine.
    Unavailable(Unavailable),
    /// Known, but its feature is off.
    NotCompiled {
        /// The feature to enable.
        feature: &'static str,
    },
    /// Known, but this release does not contain it.
    NotReleased,
}

/// The factories compiled in and the table of known names. A program adds transports of its own at run time.
#[derive(Clone, Default)]
pub struct Registry {
    factories: Vec<Arc<dyn Factory>>,
    known: Vec<BackendName>,
}

impl Registry {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds names that users may write.
    #[must_use]
    pub fn with_names(mut self, known: &[BackendName]) -> Self {
        self.known.extend_from_slice(known);
        self
    }

    /// Returns the names that users may write, with those of backends that are not compiled in.
    pub fn known_names(&self) -> &[BackendName] {
        &self.known
    }

    /// Adds a backend, also one that no table knows. Errors: `Invalid` when its name is taken.
    pub fn add(&mut self, factory: impl Factory + 'static) -> Result<&mut Self> {
        self.add_shared(Arc::new(factory))
    }

    /// Adds a backend that is shared with other registries. Errors as [`add`](Registry::add).
    pub fn add_shared(&mut self, factory: Arc<dyn Factory>) -> Result<&mut Self> {
        let name = factory.name();
        if self.factory(name).is_some() {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!("backend {name} is registered already"),
            ));
        }
        self.factories.push(factory);
        self.factories.sort_by_key(|factory| factory.placement().order);
        Ok(self)
    }

    /// The same registry with each factory inside another one, of the same name.
    #[must_use]
    pub fn wrapped(mut self, wrap: impl Fn(Arc<dyn Factory>) -> Arc<dyn Factory>) -> Self {
        self.factories = self.factories.into_iter().map(wrap).collect();
        self.factories.sort_by_key(|factory| factory.placement().order);
        self
    }

    /// All factories, in order of preference.
    pub fn factories(&self) -> &[Arc<dyn Factory>] {
        &self.factories
    }

    fn factory(&self, name: &str) -> Option<&Arc<dyn Factory>> {
        self.factories.iter().find(|factory| factory.name() == name)
    }

    /// Every name there is: compiled in or known, each once.
    pub fn names(&self) -> Vec<&'static str> {
        let mut names: Vec<_> = self.known.iter().map(|known| known.name).collect();
        for factory in &self.factories {
            if !names.contains(&factory.name()) {
                names.push(factory.name());
            }
        }
        names
    }

    /// The proper name for what a user wrote: any letter case, aliases. Errors: `UnknownBackend`.
    pub fn canonical(&self, written: &str) -> Result<&'static str> {
        let is = |name: &str| name.eq_ignore_ascii_case(written);
        let known = self
            .known
            .iter()
            .find(|known| is(known.name) || known.aliases.iter().any(|alias| is(alias)));
        if let Some(known) = known {
            return Ok(known.name);
        }
        if let Some(name) = self.names().into_iter().find(|name| is(name)) {
            return Ok(name);
        }
        let aliases = self.known.iter().flat_map(|known| known.aliases.iter().copied());
        let hint = nearest(written, self.names().into_iter().chain(aliases))
            .map_or_else(String::new, |near| format!("did you mean {near}? "));
        Err(Error::new(
            ErrorKind::UnknownBackend,
            format!("backend \"{written}\" is unknown; {hint}known: {}", self.names().join(", ")),
        ))
    }

    /// Looks up `written`. Errors: `UnknownBackend`.
    pub fn status(
        &self,
        written: &str,
        options: &Options,
    ) -> Result<(&'static str, BackendStatus)> {
        let name = self.canonical(written)?;
        if let Some(factory) = self.factory(name) {
            let standing = match factory.available(options) {
                Ok(availability) => BackendStatus::Available(availability),
                Err(unavailable) => BackendStatus::Unavailable(unavailable),
            };
            return Ok((name, standing));
        }
        let feature =
            self.known.iter().find(|known| known.name == name).and_then(|known| known.feature);
        Ok((
            name,
            feature.map_or(BackendStatus::NotReleased, |feature| BackendStatus::NotCompiled {
                feature,
            }),
        ))
    }

    /// The factory behind `written`, usable on this machine. Errors: `UnknownBackend`, `NotCompiled` or `Unavailable`;
    /// three different sentences.
    pub fn require(
        &self,
        written: &str,
        options: &Options,
    ) -> Result<(&Arc<dyn Factory>, Availability)> {
        let (name, standing) = self.status(written, options)?;
        match (standing, self.factory(name)) {
            (BackendStatus::Available(availability), Some(factory)) => Ok((factory, availability)),
            (standing, _) => Err(standing.error(name)),
        }
    }
}

impl BackendStatus {
    /// The sentence for a backend that cannot be used.
    fn error(self, name: &'static str) -> Error {
        match self {
            _ if injected("one-error") => {
                Error::new(ErrorKind::Unavailable, format!("backend {name} is unavailable"))
            }
            BackendStatus::Unavailable(why) => {
                Error::new(ErrorKind::Unavailable, format!("backend {name} is unavailable: {why}"))
            }
            BackendStatus::NotCompiled { feature } => Error::new(
                ErrorKind::NotCompiled,
                format!("backend {name} is not in this build: enable feature \"{feature}\""),
            ),
            BackendStatus::NotReleased | BackendStatus::Available(_) => Error::new(
                ErrorKind::NotCompiled,
                format!("backend {name} is not in this release: `kvx backends` lists what is"),
            ),
        }
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.factories.iter().map(|factory| factory.name())).finish()
    }
}
