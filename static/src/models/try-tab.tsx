// Ways to try a model: the chat with it chosen, and a request to paste into a shell or a program.
import type { ReactNode } from "react";
import { Link } from "react-router";
import { Code } from "../chat/markdown";
import { chatAddress } from "../chat/models";
import { requestOf, UNSET } from "../chat/settings";
import { curl, embed, python } from "../chat/snippets";
import { Panel } from "../nodes/detail/panel";
import { canTalk, loadRefusal, type ModelRow } from "./rows";
import "../chat/chat.css";

export function TryTab({ row }: { row: ModelRow }): ReactNode {
  const { origin } = window.location;
  const request = requestOf(row.name, UNSET, [{ role: "user", content: "Hello!" }]);
  const cases = row.definition?.use_cases ?? [];
  const refusal = loadRefusal(row);
  return (
    <Panel title="Try it">
      {refusal !== "" && <p className="risk">Not possible now: {refusal}.</p>}
      {canTalk(row) && (
        <p>
          <Link className="button primary" to={chatAddress(row.name)}>
            Chat with <bdi>{row.name}</bdi>
          </Link>
        </p>
      )}
      <p className="muted">Set LOCALAI_API_KEY to one of your API keys. The first request loads the model.</p>
      {canTalk(row) && (
        <>
          <h3>curl</h3>
          <Code text={curl(origin, request)} />
          <h3>Python</h3>
          <Code text={python(origin, request)} />
        </>
      )}
      {cases.includes("embeddings") && (
        <>
          <h3>Embeddings</h3>
          <Code text={embed(origin, row.name)} />
        </>
      )}
      {!canTalk(row) && !cases.includes("embeddings") && <p className="anywhere">Use cases: {cases.join(", ") || "not stated"}. The API docs have a request for each.</p>}
    </Panel>
  );
}
