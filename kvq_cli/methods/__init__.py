"""The compression methods, one file each: which streams are cached, by which codec, in which windows."""
