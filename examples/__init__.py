"""Programs that show the plugin at work."""
