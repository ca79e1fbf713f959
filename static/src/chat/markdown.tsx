// Text of a model as Markdown. It is no more to be trusted than any text from outside: HTML in it shows as text, a link
// leads nowhere but to the web or to a mail, and no picture is loaded.
import { memo, type ReactNode } from "react";
import Markdown, { type Components } from "react-markdown";
import remarkGfm from "remark-gfm";
import { CopyButton } from "../ui/copy";
import type { Blocks } from "./blocks";

export function Rendered({ blocks: { done, tail } }: { blocks: Blocks }): ReactNode {
  return (
    <div className="chat-text">
      {[...done, tail].map((text, at) => (
        // What is finished stays where it is.
        <Block key={at} text={text} />
      ))}
    </div>
  );
}

const Block = memo(function Block({ text }: { text: string }): ReactNode {
  return (
    <Markdown remarkPlugins={PLUGINS} components={COMPONENTS}>
      {text}
    </Markdown>
  );
});

const PLUGINS = [remarkGfm];

/** Only these leave the page; what is relative would lead into it. */
const OUTSIDE = /^(https?:\/\/|mailto:)/i;

function Outward({ href = "", children }: { href?: string | undefined; children?: ReactNode }): ReactNode {
  if (!OUTSIDE.test(href)) return <span>{children}</span>;
  return (
    <a href={href} target="_blank" rel="noopener noreferrer nofollow">
      {children}
    </a>
  );
}

/** A heading of an answer is none of the page, whose levels it does not know. */
function heading({ children }: { children?: ReactNode }): ReactNode {
  return <p className="chat-heading">{children}</p>;
}

interface Tree {
  value?: string;
  children?: readonly Tree[];
}

/** The content of a part of the text. */
function plain(tree: Tree | undefined): string {
  return tree?.value ?? tree?.children?.map(plain).join("") ?? "";
}

const COMPONENTS: Components = {
  a: ({ href, children }) => <Outward href={href}>{children}</Outward>,
  img: ({ src, alt }) => <Outward href={typeof src === "string" ? src : ""}>[image: {alt === undefined || alt === "" ? "no description" : alt}]</Outward>,
  h1: heading,
  h2: heading,
  h3: heading,
  h4: heading,
  h5: heading,
  h6: heading,
  input: ({ checked }) => <span>{checked === true ? "☑" : "☐"}</span>,
  li: ({ children }) => <li>{children}</li>,
  table: ({ children }) => (
    <div className="chat-wide" tabIndex={0} role="group" aria-label="Table">
      <table>{children}</table>
    </div>
  ),
  pre: ({ node }) => <Code text={plain(node).replace(/\n$/, "")} />,
};

/** Code as it stands, with a button to copy it. */
export function Code({ text }: { text: string }): ReactNode {
  return (
    <div className="chat-code">
      <pre className="chat-wide" tabIndex={0} role="group" aria-label="Code">
        <code>{text}</code>
      </pre>
      <CopyButton small text={text} label="Copy code" />
    </div>
  );
}
