//! libfabric behind its wrappers.
