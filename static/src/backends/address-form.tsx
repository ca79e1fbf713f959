// Installing what no gallery lists: an image, an archive's or a folder's address, the name it gets, and a second name.
import { useId, useState, type ReactNode, type SubmitEvent } from "react";
import { Button } from "../ui/button";
import { addressProblem, type Address } from "./address";

export function AddressForm({ onChoose }: { onChoose: (address: Address) => void }): ReactNode {
  const [address, setAddress] = useState<Address>({ uri: "", name: "", alias: "" });
  const [sent, setSent] = useState(false);
  const messageId = useId();
  const problem = sent ? addressProblem(address) : null;
  const submit = (event: SubmitEvent<HTMLFormElement>) => {
    event.preventDefault();
    setSent(true);
    const trimmed = { uri: address.uri.trim(), name: address.name.trim(), alias: address.alias.trim() };
    if (addressProblem(trimmed) === null) onChoose(trimmed);
  };
  const field = (name: keyof Address, label: string, description: string) => (
    <label className="field">
      {label}
      <input
        className="input"
        value={address[name]}
        placeholder={description}
        autoCapitalize="none"
        spellCheck={false}
        aria-invalid={problem?.field === name || undefined}
        aria-describedby={problem?.field === name ? messageId : undefined}
        onChange={(event) => setAddress({ ...address, [name]: event.target.value })}
      />
    </label>
  );
  return (
    <form className="stack" onSubmit={submit} aria-label="Install from an address">
      <p className="muted">Each node downloads the backend from this address and must be able to reach it. A path is read on the node.</p>
      {field("uri", "Address", "oci://…, https://… or /path")}
      {field("name", "Name (required for images)", "my-backend")}
      {field("alias", "Alias (optional)", "")}
      {problem !== null && (
        <p className="problem" role="alert" id={messageId}>
          {problem.text}
        </p>
      )}
      <div>
        <Button type="submit" kind="primary">
          Choose nodes
        </Button>
      </div>
    </form>
  );
}
