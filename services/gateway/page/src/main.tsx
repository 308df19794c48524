import { render } from "preact";
import "./style/shell.css";
import { App } from "./shell/app.tsx";

const place = document.getElementById("app");
if (place) render(<App />, place);
