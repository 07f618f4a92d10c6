"""Example programs that use the plugin."""
