//! Configuration as vLLM writes it.
