"""CatbAbI: explicit models of several depths beside one implicit layer."""
