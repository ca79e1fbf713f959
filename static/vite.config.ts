// How the page is built and its unit tests run. The output has hashed names, and a manifest from which the
// server's one template takes them.
import react from "@vitejs/plugin-react";
import { defineConfig } from "vitest/config";

export default defineConfig({
  plugins: [react()],
  base: "/static/ui/",
  publicDir: false,
  build: {
    manifest: "manifest.json",
    sourcemap: false,
    target: "es2022",
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
    rolldownOptions: {
      input: "src/main.tsx",
      // A browser has six connections to a server, and each file costs the server as much as a small answer: few
      // files. All styles are one; what four parts of the pages share is one, and is loaded with the first page.
      output: { codeSplitting: { groups: [{ name: "style", test: /\.css$/ }, { name: "shared", minShareCount: 4 }] } },
    },
  },
  test: {
    environment: "jsdom",
    // A document for each file is made six times as fast in a context as in a thread of its own.
    pool: "vmThreads",
    include: ["src/**/*.test.{ts,tsx}"],
    restoreMocks: true,
    // For a test that hangs; on a busy machine everything takes its time.
    testTimeout: 120_000,
    hookTimeout: 120_000,
    setupFiles: ["src/test-setup.ts"],
  },
});
