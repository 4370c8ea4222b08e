"""The backends, one file each; every module here is imported when the registry is first asked."""
