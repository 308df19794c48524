import { defineConfig } from "vite";

// Relative addresses, because a proxy may serve the gateway below a prefix (--root-path).
export default defineConfig({
  base: "./",
  build: {
    outDir: "static",
    emptyOutDir: true,
    target: "es2022",
    assetsInlineLimit: 0,
    modulePreload: false,
    reportCompressedSize: false,
  },
});
