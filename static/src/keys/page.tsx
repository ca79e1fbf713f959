// A person's own API keys: create one, which is shown once, and revoke them; and the models that may be used with them.
import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useState, type ReactNode, type SubmitEvent } from "react";
import { useAction } from "../api/action";
import { call, client } from "../api/client";
import type { components } from "../api/schema";
import { useDefinitions } from "../models/data";
import type { Definition } from "../models/rows";
import { Fetched, Panel } from "../nodes/detail/panel";
import { announce } from "../ui/announce";
import { Button } from "../ui/button";
import { Command } from "../ui/copy";
import { Confirm } from "../ui/dialog";
import { Problem } from "../ui/problem";
import type { Column } from "../ui/rows";
import { Table } from "../ui/table";
import { TextField } from "../ui/text-field";
import { Ago } from "../ui/time";
import { PageHead } from "../ui/title";
import "../nodes/detail/detail.css";
import "../nodes/shared/shared.css";
import "../models/models.css";

type ApiKey = components["schemas"]["ApiKey"];
type Created = components["schemas"]["CreatedApiKey"];

const KEY = ["keys"] as const;
/** Longest name of a key, in characters. */
const LONGEST_NAME = 100;

export function KeysPage(): ReactNode {
  return (
    <div className="models-page">
      <PageHead title="API keys" note="A key has your permissions. Programs send the key as Authorization: Bearer." />
      <Keys />
      <Models />
    </div>
  );
}

function Keys(): ReactNode {
  const queries = useQueryClient();
  const query = useQuery({ queryKey: KEY, queryFn: async ({ signal }) => (await call(client.GET("/api/auth/api-keys", { signal }))).keys });
  const [revoked, setRevoked] = useState<ApiKey | null>(null);
  const reread = () => queries.invalidateQueries({ queryKey: KEY });
  const columns: readonly Column<ApiKey>[] = [
    { key: "name", title: "Name", value: ({ name }) => name, cell: ({ name }) => <bdi>{name}</bdi> },
    { key: "prefix", title: "Begins with", cell: ({ keyPrefix }) => <code>{keyPrefix}…</code> },
    { key: "created", title: "Created", value: ({ createdAt }) => createdAt, cell: ({ createdAt }) => <Ago at={createdAt} /> },
    {
      key: "action", title: "Action",
      cell: (key) => (
        <Button small aria-label={`Revoke ${key.name}`} onClick={() => setRevoked(key)}>
          Revoke…
        </Button>
      ),
    },
  ];
  return (
    <Panel title="Your keys">
      <Create onCreated={() => void reread()} />
      <Fetched query={query} subject="your keys">
        {(keys) => (keys.length === 0 ? <p className="muted">You have no API keys.</p> : <Table name="Your API keys" columns={columns} rows={keys} rowId={({ id }) => id} rowName={({ name }) => name} />)}
      </Fetched>
      {revoked !== null && <Revoke of={revoked} onDone={() => void reread()} onClose={() => setRevoked(null)} />}
    </Panel>
  );
}

function Create({ onCreated }: { onCreated: () => void }): ReactNode {
  const [name, setName] = useState("");
  const [created, setCreated] = useState<Created | null>(null);
  const create = useAction((body: { name: string }) => call(client.POST("/api/auth/api-keys", { body })), (made) => {
    setCreated(made);
    setName("");
    onCreated();
    announce("Key created. Copy it now: it is not shown again.");
  });
  const done = () => {
    create.forget();
    setCreated(null);
  };
  const problem = Array.from(name.trim()).length > LONGEST_NAME ? `A name can have at most ${LONGEST_NAME} characters.` : "";
  const refusal = created !== null ? "Copy the new key and press Done first" : name.trim() === "" ? "Enter a name first" : problem;
  const submit = (event: SubmitEvent<HTMLFormElement>) => {
    event.preventDefault();
    if (refusal === "" && !create.busy) create.run({ name: name.trim() });
  };
  return (
    <form className="stack" noValidate onSubmit={submit}>
      <div className="row wrap add-name">
        <TextField label="Name of a new key" description="What the key is for, such as a program or a machine." value={name} problem={problem} onChange={setName} />
        <Button type="submit" kind="primary" busy={create.busy} refusal={refusal}>
          Create key
        </Button>
      </div>
      <Problem error={create.error} />
      {created !== null && (
        <section className="risk stack" aria-label={`New key ${created.name}`}>
          <p>
            <strong>Copy the key now.</strong> It is not shown again.
          </p>
          <Command text={created.key} />
          <div>
            <Button small onClick={done}>
              Done
            </Button>
          </div>
        </section>
      )}
    </form>
  );
}

function Revoke({ of, onDone, onClose }: { of: ApiKey; onDone: () => void; onClose: () => void }): ReactNode {
  const revoke = useAction(() => call(client.DELETE("/api/auth/api-keys/{key_id}", { params: { path: { key_id: of.id } } })), () => {
    announce(`Key ${of.name} revoked.`);
    onDone();
  });
  return (
    <Confirm open danger onClose={onClose} title={<>Revoke <bdi>{of.name}</bdi></>} action="Revoke" busy={revoke.busy} error={revoke.error} onConfirm={() => revoke.run(undefined, onClose)}>
      <p>Programs that use this key are refused from now on. This cannot be undone.</p>
    </Confirm>
  );
}

const COLUMNS: readonly Column<Definition>[] = [
  { key: "name", title: "Name", value: ({ id }) => id, cell: ({ id }) => <bdi className="mono">{id}</bdi> },
  { key: "uses", title: "Uses", cell: ({ capabilities }) => capabilities.map((flag) => flag.replace("FLAG_", "").toLowerCase().replaceAll("_", " ")).join(", ") },
];

function Models(): ReactNode {
  const query = useDefinitions();
  return (
    <Panel title="Models you can use">
      <Fetched query={query} subject="the models">
        {(models) => (models.length === 0 ? <p className="muted">No models are defined.</p> : <Table name="Models you can use" columns={COLUMNS} rows={models} rowId={({ id }) => id} rowName={({ id }) => id} first={50} />)}
      </Fetched>
    </Panel>
  );
}
