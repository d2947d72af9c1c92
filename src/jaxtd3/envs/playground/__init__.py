"""MuJoCo Playground's environments: adapter, meshes, observation layout, mirror."""
