//! Loom's atomics for models.
//!
//! Loom treats a `SeqCst` access as acquire and release only, and would explore orders that cannot
//! happen. It handles `SeqCst` fences correctly, so each such access stands between two fences.
//! kvx-backend's models include this file too.
#![allow(dead_code, reason = "no crate's models use all of it")]

use loom::sync::atomic as loom_atomic;
pub(crate) use loom::sync::atomic::{Ordering, fence};

fn between_fences<T>(order: Ordering, access: impl FnOnce() -> T) -> T {
    let is_total = order == Ordering::SeqCst;
    if is_total {
        fence(Ordering::SeqCst);
    }
    let result = access();
    if is_total {
        fence(Ordering::SeqCst);
    }
    result
}

macro_rules! atomic {
    ($name:ident, $value:ty, $($more:ident),*) => {
        #[derive(Debug, Default)]
        pub(crate) struct $name(loom_atomic::$name);

        impl $name {
            pub(crate) fn new(value: $value) -> Self {
                Self(loom_atomic::$name::new(value))
            }

            pub(crate) fn load(&self, order: Ordering) -> $value {
                between_fences(order, || self.0.load(order))
            }

            pub(crate) fn store(&self, value: $value, order: Ordering) {
                between_fences(order, || self.0.store(value, order));
            }

            $(pub(crate) fn $more(&self, value: $value, order: Ordering) -> $value {
                between_fences(order, || self.0.$more(value, order))
            })*
        }
    };
}

atomic!(AtomicUsize, usize, fetch_add, fetch_sub);
atomic!(AtomicU64, u64, fetch_add, fetch_sub);
atomic!(AtomicBool, bool,);

impl AtomicU64 {
    pub(crate) fn compare_exchange(
        &self,
        current: u64,
        new: u64,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u64, u64> {
        between_fences(success, || self.0.compare_exchange(current, new, success, failure))
    }
}
