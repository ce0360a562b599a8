"""The endpoint picker of an inference gateway (Gateway API Inference Extension, Envoy's ext_proc); see ``main``."""
