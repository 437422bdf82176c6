"""Small helpers shared by the packages; not part of the public interface."""
