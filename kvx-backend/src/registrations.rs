//! Registrations of memory with a native library.

use std::sync::{Arc, Weak};

use kvx_core::backend::sync::Mutex;
use kvx_core::{Error, Result};

/// A library's handle that keeps memory registered.
pub trait RegistrationHandle {
    /// Ends the registration. No operation may use the memory any more.
    ///
    /// # Errors
    /// Fails if the library keeps the memory registered.
    fn close(self) -> Result<()>;
}

/// The handles of a library that keep one region registered. They are closed once: when the region
/// is revoked, or when the agent ends.
#[derive(Debug)]
pub struct Registration<T>(Mutex<State<T>>);

#[derive(Debug)]
enum State<T> {
    Open(Vec<T>),
    Ended,
    /// The library did not close all of the handles.
    Kept(Error),
}

impl<T: RegistrationHandle> Registration<T> {
    /// Ends the registration. The caller ensures that operations on the memory have ended.
    ///
    /// # Errors
    ///
    /// If the library keeps the memory registered, now or since an earlier call, the memory must
    /// not be freed.
    pub fn end(&self) -> Result<()> {
        // The lock is held during the calls into the library: another caller must not return before
        // them.
        let mut state = self.0.lock();
        let State::Open(handles) = &mut *state else {
            return match &*state {
                State::Kept(why) => Err(why.clone()),
                _ => Ok(()),
            };
        };
        // Closes every handle, even if an earlier one fails.
        let close = |result: Result<()>, handle: T| result.and(handle.close());
        let result = handles.drain(..).fold(Ok(()), close);
        *state = result.clone().map_or_else(State::Kept, |()| State::Ended);
        result
    }
}

/// All registrations of an agent, none of which outlives it.
#[derive(Debug)]
pub struct Registrations<T> {
    /// `None` once the agent has ended.
    open: Mutex<Option<Vec<Weak<Registration<T>>>>>,
}

impl<T> Default for Registrations<T> {
    fn default() -> Self {
        Registrations { open: Mutex::new(Some(Vec::new())) }
    }
}

impl<T: RegistrationHandle> Registrations<T> {
    /// Adds a registration. It ends at once if the agent has ended meanwhile.
    pub fn add(&self, handles: Vec<T>) -> Arc<Registration<T>> {
        let registration = Arc::new(Registration(Mutex::new(State::Open(handles))));
        let mut open = self.open.lock();
        match open.as_mut() {
            Some(all) => {
                if all.len() == all.capacity() {
                    all.retain(|other| other.strong_count() > 0);
                }
                all.push(Arc::downgrade(&registration));
            }
            None => {
                drop(open);
                end_with_agent(&registration);
            }
        }
        registration
    }

    /// Ends all registrations, including those that are added later. The caller ensures that
    /// operations have ended.
    pub fn close(&self) {
        let all = self.open.lock().take().unwrap_or_default();
        all.iter().filter_map(Weak::upgrade).for_each(|registration| end_with_agent(&registration));
    }
}

/// Ends a registration whose agent has ended, so that no peer reaches the memory any more.
fn end_with_agent<T: RegistrationHandle>(registration: &Registration<T>) {
    if let Err(why) = registration.end() {
        tracing::warn!(%why, "a native library did not end a registration with its agent");
    }
}

#[cfg(test)]
mod tests {
    use kvx_core::ErrorKind;

    use super::*;

    /// A handle that counts open ones; a `stuck` one is not closed.
    struct Handle {
        open: Arc<()>,
        stuck: bool,
    }

    impl RegistrationHandle for Handle {
        fn close(self) -> Result<()> {
            if self.stuck {
                std::mem::forget(self.open);
                return Err(ErrorKind::Native.because("busy"));
            }
            Ok(())
        }
    }

    #[test]
    fn each_registration_ends_once_and_none_outlives_its_agent() {
        let (registrations, open) = (Registrations::default(), Arc::new(()));
        let held = || Arc::strong_count(&open) - 1;
        let add = || registrations.add(vec![Handle { open: Arc::clone(&open), stuck: false }]);
        let [revoked, last] = [add(), add()];
        drop(add());
        assert_eq!(held(), 2);
        revoked.end().unwrap();
        revoked.end().unwrap();
        assert_eq!(held(), 1);
        registrations.close();
        assert_eq!(held(), 0, "the agent has ended");
        let late = add();
        assert_eq!(held(), 0, "it was created while the agent ended");
        registrations.close();
        drop((last, late));
    }

    #[test]
    fn a_handle_that_the_library_keeps_is_reported_at_each_end() {
        let (registrations, open) = (Registrations::default(), Arc::new(()));
        let handle = |stuck| Handle { open: Arc::clone(&open), stuck };
        let kept = registrations.add(vec![handle(true), handle(false)]);
        for _ in 0..2 {
            assert_eq!(kept.end().unwrap_err().kind(), ErrorKind::Native);
        }
        assert_eq!(Arc::strong_count(&open) - 1, 1, "the other one is closed");
        registrations.close();
    }
}
