"""The page at `/`: its source in TypeScript, the build of it in static/, and the routes that serve the build."""
