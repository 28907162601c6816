"""Input: stores that provide bytes, container formats (torch files, safetensors, zip), and the read engine."""
