//! Registrations of memory with a native library.

use std::sync::{Arc, Weak};

use kvx_core::backend::sync::Mutex;

/// The handles of a library that keep one region registered. They are dropped once: when the region
/// is revoked, or when the agent ends.
#[derive(Debug)]
pub struct Registration<T>(Mutex<Option<T>>);

impl<T> Registration<T> {
    /// Ends the registration. The caller vouches for it that operations on the memory have ended.
    pub fn end(&self) {
        let handles = self.0.lock().take();
        drop(handles); // a call into the library, without the lock
    }
}

/// All registrations of an agent: none outlives it.
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

impl<T> Registrations<T> {
    /// Adds a registration, which ends at once if the agent has ended meanwhile.
    pub fn add(&self, handles: T) -> Arc<Registration<T>> {
        let registration = Arc::new(Registration(Mutex::new(Some(handles))));
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
                registration.end();
            }
        }
        registration
    }

    /// Ends all registrations, and those that are added later. The caller vouches for it that
    /// operations have ended.
    pub fn close(&self) {
        let all = self.open.lock().take().unwrap_or_default();
        all.iter().filter_map(Weak::upgrade).for_each(|registration| registration.end());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_registration_ends_once_and_none_outlives_its_agent() {
        let (registrations, handle) = (Registrations::default(), Arc::new(()));
        let held = || Arc::strong_count(&handle) - 1;
        let [revoked, open] = [0, 1].map(|_| registrations.add(Arc::clone(&handle)));
        drop(registrations.add(Arc::clone(&handle)));
        assert_eq!(held(), 2);
        revoked.end();
        revoked.end();
        assert_eq!(held(), 1);
        registrations.close();
        assert_eq!(held(), 0, "the agent has ended");
        let late = registrations.add(Arc::clone(&handle));
        assert_eq!(held(), 0, "it was being made while the agent ended");
        registrations.close();
        drop((open, late));
    }
}
