//! The registry of backends: the factories that are compiled in, and the table of all known names.

use std::fmt;
use std::sync::Arc;

use crate::fault_injection::injected;
use crate::names::nearest;
use crate::transport::{Availability, Factory, Unavailable};
use crate::{Error, ErrorKind, Options, Result};

/// A name that users may write, whether or not its backend is in this build.
#[derive(Clone, Copy, Debug)]
pub struct BackendName {
    /// The name, in upper case.
    pub name: &'static str,
    /// Alternative names.
    pub aliases: &'static [&'static str],
    /// The feature of the facade that compiles the backend in; `None` if this release does not
    /// contain it.
    pub feature: Option<&'static str>,
}

/// The status of a backend in this build and on this machine.
#[derive(Clone, Debug)]
pub enum BackendStatus {
    /// The backend can be used.
    Available(Availability),
    /// The backend is compiled in, but cannot be used on this machine.
    Unavailable(Unavailable),
    /// The backend is known, but its feature is off.
    NotCompiled {
        /// The feature to enable.
        feature: &'static str,
    },
    /// The backend is known, but this release does not contain it.
    NotReleased,
}

/// The factories that are compiled in, and the table of known names. A program can add its own
/// transports at run time.
#[derive(Clone, Default)]
pub struct Registry {
    factories: Vec<Arc<dyn Factory>>,
    known: Vec<BackendName>,
}

impl Registry {
    /// Creates an empty registry.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds names that users may write.
    #[must_use]
    pub fn with_names(mut self, known: &[BackendName]) -> Self {
        self.known.extend_from_slice(known);
        self
    }

    /// Returns the names that users may write, including those of backends that are not compiled
    /// in.
    pub fn known_names(&self) -> &[BackendName] {
        &self.known
    }

    /// Adds a backend. Its name need not be in the table of known names.
    ///
    /// # Errors
    /// `Invalid` if a backend with this name is already registered.
    pub fn add(&mut self, factory: impl Factory + 'static) -> Result<&mut Self> {
        self.add_shared(Arc::new(factory))
    }

    /// Adds a backend that is shared with other registries.
    ///
    /// # Errors
    /// `Invalid` if a backend with this name is already registered.
    pub fn add_shared(&mut self, factory: Arc<dyn Factory>) -> Result<&mut Self> {
        let name = factory.name();
        if self.factory(name).is_some() {
            return Err(ErrorKind::Invalid.because(format!("backend {name} is registered already")));
        }
        self.factories.push(factory);
        self.factories.sort_by_key(|factory| factory.placement().order);
        Ok(self)
    }

    /// Wraps each factory in another one of the same name.
    #[must_use]
    pub fn wrapped(mut self, wrap: impl Fn(Arc<dyn Factory>) -> Arc<dyn Factory>) -> Self {
        self.factories = self.factories.into_iter().map(wrap).collect();
        self.factories.sort_by_key(|factory| factory.placement().order);
        self
    }

    /// Returns all factories, in order of preference.
    pub fn factories(&self) -> &[Arc<dyn Factory>] {
        &self.factories
    }

    fn factory(&self, name: &str) -> Option<&Arc<dyn Factory>> {
        self.factories.iter().find(|factory| factory.name() == name)
    }

    /// Returns every name, compiled in or known, once each.
    pub fn names(&self) -> Vec<&'static str> {
        let mut names: Vec<_> = self.known.iter().map(|known| known.name).collect();
        for factory in &self.factories {
            if !names.contains(&factory.name()) {
                names.push(factory.name());
            }
        }
        names
    }

    /// Returns the canonical name for what a user wrote, in any letter case or as an alias.
    ///
    /// # Errors
    /// `UnknownBackend` if no backend has this name; the message suggests the nearest one.
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
        Err(ErrorKind::UnknownBackend.because(format!(
            "backend \"{written}\" is unknown; {hint}known: {}",
            self.names().join(", ")
        )))
    }

    /// Returns the canonical name and the status of the backend that a user wrote.
    ///
    /// # Errors
    /// `UnknownBackend` if no backend has this name.
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

    /// Returns the factory of the backend that a user wrote, if the backend can be used on this
    /// machine.
    ///
    /// # Errors
    /// `UnknownBackend` if no backend has this name, `NotCompiled` if it is not in this build or
    /// release, `Unavailable` if it cannot run on this machine. Each has its own message.
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
    /// Returns the error for a backend that cannot be used.
    fn error(self, name: &'static str) -> Error {
        match self {
            _ if injected("one-error") => {
                ErrorKind::Unavailable.because(format!("backend {name} is unavailable"))
            }
            BackendStatus::Unavailable(why) => {
                ErrorKind::Unavailable.because(format!("backend {name} is unavailable: {why}"))
            }
            BackendStatus::NotCompiled { feature } => ErrorKind::NotCompiled.because(format!(
                "backend {name} is not in this build: enable feature \"{feature}\""
            )),
            BackendStatus::NotReleased | BackendStatus::Available(_) => ErrorKind::NotCompiled
                .because(format!(
                    "backend {name} is not in this release: `kvx backends` lists what is"
                )),
        }
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.factories.iter().map(|factory| factory.name())).finish()
    }
}
