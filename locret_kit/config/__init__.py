"""Configuration of the commands: schemas, recipes, one reader, help."""
