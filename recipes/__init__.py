"""The recipes: one YAML file a backbone or experiment, read by `locret_kit.config.recipes`."""
