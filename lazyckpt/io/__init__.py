"""Bytes: where they come from (stores), what containers they lie in (torch files, safetensors), and the read engine."""
