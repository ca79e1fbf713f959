// The page to try a deployment: choose a model, watch it load, talk to it, see what each answer took. What is said is in
// the memory of this tab only (`conversation.ts`).
import { useContext, useEffect, useMemo, useRef, useState, type ReactNode, type RefObject } from "react";
import { Link, useSearchParams } from "react-router";
import { isLoaded, useThrottledNodes } from "../backends/throttled-nodes";
import { LiveContext, useLive } from "../live/hooks";
import { useDefinitions } from "../models/data";
import { useSession } from "../shell/session";
import { Button } from "../ui/button";
import { Confirm } from "../ui/dialog";
import { Empty, Loading } from "../ui/empty";
import { Problem } from "../ui/problem";
import { useShortcut } from "../ui/shortcuts";
import { PageHead } from "../ui/title";
import { isOpen, messagesOf } from "./answer";
import { Composer } from "./composer";
import { conversationOf, useChat, type Chat, type Conversation } from "./conversation";
import { Code } from "./markdown";
import { loadOf } from "./loads";
import { canChat } from "./models";
import { ModelField, SettingsFields } from "./options";
import { requestOf, wrongIn } from "./settings";
import { curl, python } from "./snippets";
import { TurnView } from "./turn";
import { useFollow } from "./use-follow";
import "../nodes/shared/shared.css";
import "../operations/operations.css";
import "./chat.css";

export function ChatPage(): ReactNode {
  const store = useContext(LiveContext);
  const { data: user } = useSession();
  if (user === undefined || user === null) return null;
  return <ChatOf conversation={conversationOf(user.id, store)} />;
}

function ChatOf({ conversation }: { conversation: Conversation }): ReactNode {
  const chat = useChat(conversation);
  const last = chat.turns.at(-1);
  const busy = last !== undefined && isOpen(last.answer);
  const { field, stop, edit, retry } = useActions(conversation);
  const [open, setOpen] = useState(false);
  const { away, jump } = useFollow(chat.turns);
  const problems = wrongIn(chat.settings);
  const invalid = Object.keys(problems).length > 0;
  useShortcut("escape", conversation.stop, "Stop the answer", busy);
  const send = () => {
    if (invalid) setOpen(true);
    else conversation.send();
    jump();
    field.current?.focus();
  };
  return (
    <div className="chat">
      <PageHead title="Chat" note="Try a model. Messages stay in this tab.">
        <Clear conversation={conversation} empty={chat.turns.length === 0} />
      </PageHead>
      <Model conversation={conversation} chat={chat} />
      <div className="chat-mores">
        <details className="chat-more" open={open} onToggle={(event) => setOpen(event.currentTarget.open)}>
          <summary>Settings</summary>
          <SettingsFields settings={chat.settings} problems={problems} onChange={(settings) => conversation.set({ settings })} />
        </details>
        <AsCode chat={chat} />
      </div>
      {/* Whole answers are announced, not each token. */}
      <div className="chat-log" role="log" aria-live="off" aria-label="Conversation">
        {chat.turns.map((turn) => (
          <TurnView key={turn.id} turn={turn} last={turn === last} onAgain={retry} onEdit={edit} />
        ))}
      </div>
      <div className="chat-bottom">
        {away && (
          <Button small className="chat-jump" onClick={jump}>
            Jump to latest
          </Button>
        )}
        <Composer conversation={conversation} chat={chat} busy={busy} refusal={refusalOf(chat, invalid)} field={field} onSend={send} onStop={stop} />
      </div>
    </div>
  );
}

interface Actions {
  field: RefObject<HTMLTextAreaElement | null>;
  stop: () => void;
  edit: () => void;
  retry: () => void;
}

/** Each action gives the focus to the field for questions, because its own button goes. The functions stay the same. */
function useActions(conversation: Conversation): Actions {
  const field = useRef<HTMLTextAreaElement>(null);
  return useMemo(() => {
    const focusAfter = (act: () => void) => () => {
      act();
      field.current?.focus();
    };
    return { field, stop: focusAfter(conversation.stop), edit: focusAfter(() => conversation.edit()), retry: focusAfter(() => conversation.retry()) };
  }, [conversation]);
}

function refusalOf({ model, draft }: Chat, invalid: boolean): string {
  if (model === "") return "Choose a model first";
  // What is wrong stands at its field, which a press opens.
  return draft.trim() === "" && !invalid ? "Type a message first" : "";
}

/** The model of the address, of the conversation, or the first one that is loaded. */
function Model({ conversation, chat }: { conversation: Conversation; chat: Chat }): ReactNode {
  const [query, setQuery] = useSearchParams();
  const definitions = useDefinitions();
  const nodes = useThrottledNodes();
  // Only administrators are told where models run.
  const isAdmin = useSession().data?.role === "admin";
  const loaded = useMemo(() => {
    const modelCounts = new Map<string, number>();
    for (const node of nodes.values()) for (const { model_name, state } of node.models) if (state === "loaded") modelCounts.set(model_name, (modelCounts.get(model_name) ?? 0) + 1);
    return modelCounts;
  }, [nodes]);
  const allDefinitions = useMemo(() => definitions.data ?? [], [definitions.data]);
  const requestedModel = query.get("model") ?? "";
  const offered = useMemo(() => allDefinitions.filter(canChat), [allDefinitions]);
  const usual = isLoaded(nodes) || !isAdmin ? ((offered.find((definition) => loaded.has(definition.id)) ?? offered[0])?.id ?? "") : "";
  const selectedModel = requestedModel || chat.model || usual;
  const loading = useLive((state) => loadOf(state, selectedModel) !== undefined);
  useEffect(() => {
    if (selectedModel !== chat.model) conversation.set({ model: selectedModel });
  }, [conversation, selectedModel, chat.model]);
  if (definitions.data === undefined) {
    return definitions.error === null ? <Loading subject="models" /> : <Problem error={definitions.error} onRetry={() => void definitions.refetch()} />;
  }
  if (offered.length === 0 && selectedModel === "") return <NoModels isAdmin={isAdmin} />;
  const choose = (model: string) => {
    conversation.set({ model });
    setQuery({ model }, { replace: true, preventScrollReset: true });
  };
  return <ModelField model={selectedModel} definitions={allDefinitions} loaded={isAdmin ? loaded : null} loading={loading} onChange={choose} />;
}

function NoModels({ isAdmin }: { isAdmin: boolean }): ReactNode {
  return (
    <Empty title="No chat models">
      <p>Models for embeddings cannot chat.</p>
      {isAdmin ? (
        <Link className="button primary" to="/app/models/add">
          Add a model
        </Link>
      ) : (
        <p>Ask an administrator to add one.</p>
      )}
    </Empty>
  );
}

function Clear({ conversation, empty }: { conversation: Conversation; empty: boolean }): ReactNode {
  const [isConfirming, setIsConfirming] = useState(false);
  const clear = () => {
    conversation.clear();
    setIsConfirming(false);
  };
  return (
    <>
      <Button refusal={empty ? "No messages" : ""} onClick={() => setIsConfirming(true)}>
        Clear…
      </Button>
      {isConfirming && (
        <Confirm open danger onClose={() => setIsConfirming(false)} title="Clear the conversation" action="Clear" onConfirm={clear}>
          <p>The messages are stored nowhere else.</p>
        </Confirm>
      )}
    </>
  );
}

/** The last question with all before it, as one would send it; written when it is opened. */
function AsCode({ chat }: { chat: Chat }): ReactNode {
  const [open, setOpen] = useState(false);
  return (
    <details className="chat-more" onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>As curl and Python</summary>
      {open && <Snippets chat={chat} />}
    </details>
  );
}

function Snippets({ chat: { model, settings, turns, draft } }: { chat: Chat }): ReactNode {
  const question = turns.at(-1)?.question ?? (draft.trim() === "" ? "Hello!" : draft);
  const request = requestOf(model, settings, [...messagesOf(turns.slice(0, -1)), { role: "user", content: question }]);
  const { origin } = window.location;
  return (
    <div className="stack">
      <p className="muted">The conversation up to the last question. Set LOCALAI_API_KEY to one of your API keys.</p>
      <h2>curl</h2>
      <Code text={curl(origin, request)} />
      <h2>Python</h2>
      <Code text={python(origin, request)} />
    </div>
  );
}
