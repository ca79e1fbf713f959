// The search over everything (Ctrl-K): nodes, models, backends, operations, pages and actions, by keyboard alone. The
// live state is asked only while it is open.
import { useQuery } from "@tanstack/react-query";
import { Command } from "cmdk";
import { Dialog } from "radix-ui";
import { useDeferredValue, useMemo, useRef, useState, type ReactNode } from "react";
import { useNavigate } from "react-router";
import { call, client } from "../api/client";
import type { components } from "../api/schema";
import { canChat } from "../chat/models";
import { useLive } from "../live/hooks";
import { useDefinitions } from "../models/data";
import { Icon } from "../ui/icons";
import { useReturnFocus } from "../ui/return-focus";
import { choose } from "../ui/theme";
import {
  atFirst,
  backendEntries,
  chatEntries,
  find,
  index,
  modelEntries,
  nodeEntries,
  operationEntries,
  verbEntries,
  withVerbs,
  type Entry,
  type Kind,
} from "./palette-search";

const LIMIT = 6;

interface PaletteProps {
  onClose: () => void;
  onShortcuts: () => void;
  onSignOut: () => void;
}

export function Palette(props: PaletteProps): ReactNode {
  const isLeaving = useRef(false);
  const focus = useReturnFocus(() => !isLeaving.current);
  const navigate = useNavigate();
  const choice = ({ to, run }: Entry) => {
    isLeaving.current = to !== undefined;
    props.onClose();
    run?.();
    if (to !== undefined) void navigate(to);
  };
  return (
    <Dialog.Root open onOpenChange={(open) => !open && props.onClose()}>
      <Dialog.Portal>
        <Dialog.Overlay className="overlay" />
        <Dialog.Content className="palette" aria-describedby={undefined} {...focus}>
          <Dialog.Title className="visually-hidden">Search</Dialog.Title>
          <Search {...props} onChoice={choice} />
        </Dialog.Content>
      </Dialog.Portal>
    </Dialog.Root>
  );
}

function Search({ onChoice, ...actions }: PaletteProps & { onChoice: (entry: Entry) => void }): ReactNode {
  const [query, setQuery] = useState("");
  const [chosen, setChosen] = useState("");
  const catalogue = useCatalogue();
  const groups = useResults(query, useEntries(catalogue.data, actions));
  const shown = [...groups.values()].flat();
  // What was chosen may be gone from the results; then the first one is.
  const value = shown.some((entry) => entry.key === chosen) ? chosen : (shown[0]?.key ?? "");
  const type = (text: string) => {
    setQuery(text);
    setChosen("");
  };
  return (
    <Command shouldFilter={false} loop label="Search" value={value} onValueChange={setChosen}>
      <div className="palette-field">
        <Icon name="search" />
        <Command.Input value={query} onValueChange={type} placeholder="Search, or type what to do: drain gpu-1" />
        <kbd>Esc</kbd>
      </div>
      <Command.List className="palette-list">
        {[...groups].map(([kind, entries]) => (
          <Group key={kind} kind={kind} entries={entries} onChoice={onChoice} />
        ))}
      </Command.List>
      <p className="palette-note" role="status">
        {shown.length === 0 && <>No results. </>}
        {catalogue.isPending && <>Searching backends…</>}
        {catalogue.isError && <>The catalogue could not be loaded. Results include installed backends only.</>}
      </p>
    </Command>
  );
}

function Group({ kind, entries, onChoice }: { kind: Kind; entries: Entry[]; onChoice: (entry: Entry) => void }): ReactNode {
  return (
    <Command.Group heading={kind}>
      {entries.map((entry) => (
        <Command.Item key={entry.key} value={entry.key} className="palette-item" onSelect={() => onChoice(entry)}>
          <Icon name={entry.icon} />
          <span className="name palette-title">{entry.title}</span>
          <span className="name muted palette-detail">{entry.detail}</span>
        </Command.Item>
      ))}
    </Command.Group>
  );
}

type Catalogue = components["schemas"]["Catalogue"];

const CATALOGUE = { items: 9999, sort: "name", order: "asc" } as const;

function useCatalogue(): { data: Catalogue | undefined; isPending: boolean; isError: boolean } {
  return useQuery({
    queryKey: ["backends", CATALOGUE],
    queryFn: ({ signal }) => call(client.GET("/api/backends", { params: { query: CATALOGUE }, signal })),
  });
}

function useEntries(catalogue: Catalogue | undefined, actions: PaletteProps): Entry[] {
  const nodes = useLive((state) => state.nodes);
  const operations = useLive((state) => state.operations);
  const { data: defined } = useDefinitions();
  const resultGroups = useMemo(
    () => [
      ...nodeEntries(nodes.values()),
      ...modelEntries(nodes.values(), (defined ?? []).map(({ id }) => id)),
      ...backendEntries(nodes.values(), catalogue?.backends ?? []),
    ],
    [nodes, catalogue, defined],
  );
  const live = useMemo(() => operationEntries(operations.values()), [operations]);
  const fixed = useMemo(() => places(actions), [actions]);
  return useMemo(() => [...live, ...resultGroups, ...fixed], [live, resultGroups, fixed]);
}

function useResults(query: string, present: Entry[]): Map<Kind, Entry[]> {
  // The cluster moves many times a second and may follow behind; what is typed may not: Enter takes what is on top.
  const entries = useDeferredValue(present);
  const searchIndex = useMemo(() => index(entries), [entries]);
  const backends = useMemo(() => entries.filter((entry) => entry.kind === "Backends"), [entries]);
  const nodes = useDeferredValue(useLive((state) => state.nodes));
  const { data: defined } = useDefinitions();
  const models = useMemo(() => (defined ?? []).filter(canChat).map(({ id }) => id), [defined]);
  return useMemo(() => {
    if (query.trim() === "") return atFirst(entries, LIMIT);
    const verbs = [...chatEntries(query, models), ...verbEntries(query, nodes.values(), backends)];
    return withVerbs(query, verbs, find(searchIndex, query, LIMIT), LIMIT);
  }, [entries, searchIndex, query, nodes, backends, models]);
}

function places({ onShortcuts, onSignOut }: PaletteProps): Entry[] {
  return [
    { key: "page overview", kind: "Pages", icon: "overview", title: "Overview", detail: "g o", words: "home dashboard charts first", to: "/app/overview" },
    { key: "page nodes", kind: "Pages", icon: "nodes", title: "Nodes", detail: "g n", to: "/app/nodes" },
    { key: "page models", kind: "Pages", icon: "model", title: "Models", detail: "g m", to: "/app/models" },
    { key: "page add model", kind: "Pages", icon: "model", title: "Add a model", detail: "Models", words: "import download gallery catalogue hugging face ollama", to: "/app/models/add" },
    { key: "page chat", kind: "Pages", icon: "chat", title: "Chat", detail: "g t", words: "talk try ask model playground", to: "/app/chat" },
    { key: "page capacity", kind: "Pages", icon: "capacity", title: "Capacity", detail: "g c", words: "memory vram free map fit what if plan", to: "/app/capacity" },
    { key: "page scheduling", kind: "Pages", icon: "scheduling", title: "Scheduling", detail: "g s", words: "rules replicas selector", to: "/app/scheduling" },
    { key: "page backends", kind: "Pages", icon: "backends", title: "Backends", detail: "g b", to: "/app/backends" },
    { key: "page activity", kind: "Pages", icon: "activity", title: "Activity", detail: "g a", to: "/app/activity" },
    { key: "page inbox", kind: "Pages", icon: "warning", title: "Inbox", detail: "Failures", to: "/app/activity/inbox" },
    { key: "page history", kind: "Pages", icon: "activity", title: "History", detail: "Finished operations", to: "/app/activity/history" },
    { key: "page changes", kind: "Pages", icon: "activity", title: "Audit log", detail: "Changes by people", words: "changes who", to: "/app/activity/changes" },
    { key: "page health", kind: "Pages", icon: "health", title: "System health", detail: "g h", words: "schedules processes disk versions", to: "/app/health" },
    { key: "page keys", kind: "Pages", icon: "key", title: "API keys", detail: "Account", words: "token credentials", to: "/app/keys" },
    { key: "page password", kind: "Pages", icon: "key", title: "Change password", detail: "Account", to: "/app/password" },
    { key: "page admin", kind: "Pages", icon: "admin", title: "Admin", detail: "/admin/", run: () => window.location.assign("/admin/") },
    { key: "page docs", kind: "Pages", icon: "docs", title: "API docs", detail: "/api/docs", run: () => window.location.assign("/api/docs") },
    { key: "light", kind: "Actions", icon: "light", title: "Light theme", detail: "Theme", run: () => choose("light") },
    { key: "dark", kind: "Actions", icon: "dark", title: "Dark theme", detail: "Theme", run: () => choose("dark") },
    { key: "system", kind: "Actions", icon: "system", title: "System theme", detail: "Theme", run: () => choose("system") },
    { key: "keys", kind: "Actions", icon: "keyboard", title: "Keyboard shortcuts", detail: "?", run: onShortcuts },
    { key: "leave", kind: "Actions", icon: "leave", title: "Sign out", detail: "Account", run: onSignOut },
  ];
}
