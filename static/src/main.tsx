// The entry of the app.
// The styles come before modules with styles of their own: the first file sets the order of the layers.
import "./styles/tokens.css";
import "./styles/base.css";
import "./ui/ui.css";
import { setNonce } from "get-nonce";
import { StrictMode } from "react";
import { createRoot } from "react-dom/client";
import { App } from "./app";
import { startTheme } from "./ui/theme";

// Some parts add a style element; the policy lets it in by the nonce of this page only.
const nonce = document.querySelector<HTMLMetaElement>('meta[name="style-nonce"]')?.content;
if (nonce !== undefined) setNonce(nonce);
startTheme();

const root = document.getElementById("root");
if (root !== null) {
  createRoot(root).render(
    <StrictMode>
      <App />
    </StrictMode>,
  );
}
